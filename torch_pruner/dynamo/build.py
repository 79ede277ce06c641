"""From a functional ATen graph to a ``GraphCall``: partition, compile regions, join the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx

from torch_pruner import exc
from torch_pruner.dynamo.bounds import guarded, index_checks
from torch_pruner.dynamo.inplace import updates_in_place
from torch_pruner.dynamo.partition import EagerStep, PartitionedGraph, Region, partition
from torch_pruner.dynamo.runtime import (
    GraphCall,
    RegionCall,
    Step,
    TensorSpec,
    Value,
    eager_step,
    profiled,
)
from torch_pruner.dynamo.tensors import memory_order
from torch_pruner.report import GraphReport, OpFallback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.compiler.driver import CompiledGraph, Compiler
    from torch_pruner.report import Tuning


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """A graph that runs, and what the report says about it."""

    call: GraphCall
    partitioned: PartitionedGraph
    compiled: tuple[CompiledGraph, ...]

    def report(
        self, name: str, seconds: dict[str, float], tunings: Sequence[Tuning] = ()
    ) -> GraphReport:
        parts = self.partitioned
        tasks = tuple(t for c in self.compiled for t in c.tasks)
        return GraphReport(
            name=name,
            ops_total=parts.ops_total,
            ops_compiled=parts.ops_compiled,
            flops_total=parts.flops_total,
            flops_compiled=parts.flops_compiled,
            regions=len(parts.regions),
            ops_fallback=tuple(OpFallback(r.node, str(r.kind), r.detail) for r in parts.rejections),
            tasks=tasks,
            seconds=seconds,
            trials=sum(t.trials for t in tasks if t.source in ("tuned", "library")),
            weight_bytes=sum(c.plan.packed_bytes for c in self.compiled),
            workspace_bytes=sum(c.plan.workspace_bytes for c in self.compiled),
            tunings=tuple(tunings),
        )


def spec_of(fake: torch.Tensor) -> TensorSpec:
    """What a fake tensor promises about the real one."""
    shape, strides = tuple(int(d) for d in fake.shape), tuple(int(s) for s in fake.stride())
    order = memory_order(shape, strides)
    identity = tuple(range(len(shape)))
    return TensorSpec(shape, strides, fake.dtype, order or identity, order is not None)


def build_graph(
    gm: fx.GraphModule,
    compiler: Compiler,
    *,
    static: frozenset[int],
    mutated: Sequence[int] = (),
    fallback: str = "eager",
    name: str = "graph",
) -> BuiltGraph:
    """Compile ``gm``, whose refused operators ``fallback`` runs.

    ``static`` are positions of inputs that rarely change; ``mutated[k]`` is the position of the
    input that the caller replaces by output ``k``.
    Raises ``UnsupportedModel`` if ``fallback`` is ``"error"`` and an operator was refused.
    """
    partitioned = partition(gm, static_inputs=static)
    if fallback == "error" and partitioned.rejections:
        first = partitioned.rejections[0]
        raise exc.UnsupportedModel(name, f"{first.node}: {first.detail}", "allow fallback='eager'")
    numbers = {node: k for k, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    constants: dict[int, Any] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        numbers[node] = len(numbers)
        constants[numbers[node]] = _attribute(gm, str(node.target))
    outputs = cast("Sequence[Any]", gm.graph.output_node().args[0])
    in_place = updates_in_place(gm, mutated)
    last = _last_uses(partitioned, outputs)
    steps: list[Step] = []
    compiled: list[CompiledGraph] = []
    for k, step in enumerate(partitioned.steps):
        if isinstance(step, Region):
            reads, writes = step.inputs, step.outputs
            region = _region_call(step, compiler, f"{name}.{len(compiled)}")
            compiled.append(region.compiled)
            run = guarded(profiled(region.name, region), index_checks(step))
        else:
            reads, writes = _interface(step, partitioned, outputs)
            module = eager_step(step.nodes, reads, writes, in_place)
            run = _eager_call(module, fallback, [n.meta.get("val") for n in reads])
        for node in writes:
            numbers[node] = len(numbers)
        dead = [numbers[n] for n in (*reads, *writes) if last.get(n) == k and numbers[n] >= 0]
        steps.append(
            (
                run,
                tuple(numbers[n] for n in reads),
                tuple(numbers[n] for n in writes),
                tuple(dict.fromkeys(dead)),
            )
        )
    results = [Value(numbers[o]) if isinstance(o, fx.Node) else o for o in outputs]
    return BuiltGraph(
        GraphCall(steps, len(numbers), constants, results), partitioned, tuple(compiled)
    )


def _region_call(region: Region, compiler: Compiler, name: str) -> RegionCall:
    inputs = [spec_of(n.meta["val"]) for n in region.inputs]
    outputs = [spec_of(n.meta["val"]) for n in region.outputs]
    compiled = compiler.compile(region.graph, [s.order for s in inputs], [s.order for s in outputs])
    nodes = region.graph.nodes
    static = [k for k, i in enumerate(region.graph.inputs) if nodes[i].attr("static")]
    return RegionCall(name, compiled, inputs, outputs, static)


def _eager_call(
    module: fx.GraphModule, fallback: str, examples: list[Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    forward = module.forward
    if fallback == "inductor":
        inductor = torch.compile(module, backend="inductor", dynamic=False)
        return lambda values: inductor(*values)
    return lambda values: forward(*values)


def _interface(
    step: EagerStep, partitioned: PartitionedGraph, outputs: Any
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """What an eager step reads from outside, and which of its values others read."""
    inside = set(step.nodes)
    reads = dict.fromkeys(a for n in step.nodes for a in n.all_input_nodes if a not in inside)
    wanted: set[fx.Node] = set()
    fx.node.map_arg(outputs, wanted.add)
    for other in partitioned.steps:
        if other is not step:
            wanted.update(
                other.inputs
                if isinstance(other, Region)
                else (a for n in other.nodes for a in n.all_input_nodes)
            )
    return tuple(reads), tuple(n for n in step.nodes if n in wanted)


def _last_uses(partitioned: PartitionedGraph, outputs: Any) -> dict[fx.Node, int]:
    last: dict[fx.Node, int] = {}
    for k, step in enumerate(partitioned.steps):
        if isinstance(step, Region):
            used = (*step.inputs, *step.outputs)
        else:
            used = tuple(a for n in step.nodes for a in (n, *n.all_input_nodes))
        for node in used:
            last[node] = k
    fx.node.map_arg(outputs, lambda n: last.pop(n, None))
    return {n: k for n, k in last.items() if n.op != "get_attr"}


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part)
    return value
