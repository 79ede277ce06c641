"""A captured graph as data: what runs in which order, before anything is compiled.

In: a functional ATen graph. Out: a ``Program`` over numbered values, which ``build`` turns into a
callable and ``saved`` into bytes. Knows no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import fx

from torch_pruner.devices.dtypes import DEFAULT_DTYPES
from torch_pruner.dynamo.lower.activations import keep_channels_last, lie_alike
from torch_pruner.dynamo.lower.bounds import IndexCheck, flag_spec
from torch_pruner.dynamo.lower.broken_up_attention import put_together
from torch_pruner.dynamo.lower.importer import CPU, attribute
from torch_pruner.dynamo.lower.inplace import (
    IN_PLACE,
    updates_in_place,
    without_copies,
    written_by_eager,
)
from torch_pruner.dynamo.lower.partition import EagerStep, PartitionedGraph, Region, partition
from torch_pruner.dynamo.lower.sampled_maps import with_channels_together
from torch_pruner.dynamo.lower.tensors import TensorSpec, spec_of
from torch_pruner.graph.updates import written_inputs
from torch_pruner.report import OpFallback

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch_pruner.dynamo.lower.aten.demand import Range
    from torch_pruner.dynamo.lower.calls import RuntimeValue
    from torch_pruner.dynamo.lower.importer import Test
    from torch_pruner.graph.ir import Graph

__all__ = ["Program", "ProgramStep", "RegionStep", "describe", "eager_step"]


@dataclass(frozen=True, slots=True, eq=False)
class RegionStep:
    """Operators to compile together: a graph, what its inputs and outputs are to torch, which
    inputs are indices that have to be within bounds, and what the last output shows of values that
    have to be (``bounds``); a step does not write that one."""

    graph: Graph
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    checks: tuple[IndexCheck, ...] = ()
    flags: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ProgramStep:
    """One step: which values it reads and writes, and which nobody needs after it."""

    does: RegionStep | fx.GraphModule  # a module returns a tuple
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Steps over values: first the arguments, then ``constants``, then what the steps write.

    ``outputs`` are pairs: the number of a value and None, or -1 and a constant.
    """

    steps: tuple[ProgramStep, ...]
    n_values: int
    constants: Mapping[int, RuntimeValue]
    outputs: tuple[tuple[int, RuntimeValue], ...]
    ops_total: int
    ops_compiled: int
    flops_total: int
    flops_compiled: int
    refused: tuple[OpFallback, ...]
    device: torch.device = CPU  # of all regions
    static: tuple[int, ...] = ()  # positions of arguments that rarely change
    unrecordable: str = ""  # what keeps it from being recorded as a CUDA graph
    lasting: tuple[int, ...] = ()  # of others that lie where they lay before

    @property
    def written(self) -> frozenset[int]:
        """Numbers of the arguments that steps write into."""
        found: set[int] = set()
        for step in self.steps:
            if isinstance(step.does, RegionStep):
                at: Collection[int] = written_inputs(step.does.graph).values()
            else:
                at = written_by_eager(step.does)
            found.update(step.reads[i] for i in at)
        return frozenset(found)

    @property
    def regions(self) -> tuple[RegionStep, ...]:
        return tuple(s.does for s in self.steps if isinstance(s.does, RegionStep))


def describe(
    gm: fx.GraphModule,
    *,
    static: frozenset[int],
    mutated: Sequence[int] = (),
    loose: Collection[int] = (),
    device: torch.device = CPU,
    dtypes: Collection[str] = DEFAULT_DTYPES,
    unrecordable: str = "",
) -> Program:
    """``gm`` divided into what is compiled and what eager runs.

    ``static`` are positions of inputs that rarely change; ``mutated[k]`` is the position of the
    input that the caller replaces by output ``k``. Outputs at the positions ``loose`` may lie in
    another order than eager's. What is compiled is on ``device`` and of ``dtypes``.
    ``unrecordable`` is only handed on.
    """
    given, gm = gm, _rewritten(gm, mutated, device)
    partitioned, in_place = _partitioned(gm, static, mutated, dtypes, device)
    outputs = _outputs(gm)
    numbers = {node: k for k, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    constants: dict[int, RuntimeValue] = {}
    needed = _read(partitioned, outputs)
    for node in gm.graph.find_nodes(op="get_attr"):
        if node not in needed:
            continue
        numbers[node] = len(numbers)
        constants[numbers[node]] = attribute(gm, str(node.target))
    if loose:
        keep_channels_last(outputs, loose, _by_and_for_kernels(partitioned))
        lie_alike(_outputs(given), outputs, loose)
    last = _last_uses(partitioned, outputs)
    steps: list[ProgramStep] = []
    for k, step in enumerate(partitioned.steps):
        does: RegionStep | fx.GraphModule
        if isinstance(step, Region):
            reads, writes = step.inputs, step.outputs
            specs = [tuple(spec_of(n.meta["val"]) for n in nodes) for nodes in (reads, writes)]
            shown = flag_spec(step.flags)
            if step.test is None:
                does = RegionStep(step.graph, specs[0], specs[1] + shown, step.checks, step.flags)
            else:  # its checks come with it, before anything is written
                steps.append(_test(step.test, step, specs[0], numbers))
                does = RegionStep(step.graph, specs[0], specs[1], step.checks)
        else:
            reads, writes = _interface(step, partitioned, outputs)
            does = eager_step(step.nodes, reads, writes, in_place)
        for node in writes:
            numbers[node] = len(numbers)
        dead = dict.fromkeys(numbers[n] for n in (*reads, *writes) if last.get(n) == k)
        reads_at, writes_at = (tuple(numbers[n] for n in nodes) for nodes in (reads, writes))
        steps.append(ProgramStep(does, reads_at, writes_at, tuple(dead)))
    return Program(
        tuple(steps),
        len(numbers),
        constants,
        tuple((numbers[o], None) if isinstance(o, fx.Node) else (-1, o) for o in outputs),
        partitioned.ops_total,
        partitioned.ops_compiled,
        partitioned.flops_total,
        partitioned.flops_compiled,
        tuple(OpFallback(r.node, str(r.kind), r.detail) for r in partitioned.rejections),
        device,
        tuple(sorted(static)),
        unrecordable,
    )


def _rewritten(gm: fx.GraphModule, mutated: Sequence[int], device: torch.device) -> fx.GraphModule:
    """What is divided: ``gm``, or a copy with operators that say more of what is meant."""
    gm = with_channels_together(without_copies(gm, mutated))
    return gm if device.type == CPU.type else put_together(gm)


def _outputs(gm: fx.GraphModule) -> Sequence[fx.Node | RuntimeValue]:
    return cast("Sequence[fx.Node | RuntimeValue]", gm.graph.output_node().args[0])


def _partitioned(
    gm: fx.GraphModule,
    static: frozenset[int],
    mutated: Sequence[int],
    dtypes: Collection[str],
    device: torch.device,
) -> tuple[PartitionedGraph, frozenset[fx.Node]]:
    """``gm`` divided, and which of its nodes write into their first operand."""
    wanted = updates_in_place(gm, mutated)
    while True:
        found = partition(gm, static_inputs=static, dtypes=dtypes, device=device, in_place=wanted)
        kept = _unrisky(wanted, found, gm)
        if kept == wanted:
            return found, kept
        wanted = kept


def _test(
    test: Test, region: Region, specs: Sequence[TensorSpec], numbers: Mapping[fx.Node, int]
) -> ProgramStep:
    """The step that shows the flags of a region before it runs."""
    inputs = tuple(specs[i] for i in test.inputs)
    does = RegionStep(test.graph, inputs, flag_spec(region.flags), (), region.flags)
    return ProgramStep(does, tuple(numbers[region.inputs[i]] for i in test.inputs), (), ())


def eager_step(
    nodes: Sequence[fx.Node],
    reads: Sequence[fx.Node],
    writes: Sequence[fx.Node],
    in_place: Collection[fx.Node] = (),
) -> fx.GraphModule:
    """The nodes as a module of their own, from ``reads`` to a tuple of ``writes``.

    Those ``in_place`` write into their first operand.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in reads:
        copies[node] = graph.placeholder(node.name)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        if node in in_place and node.target in IN_PLACE:
            copies[node].target = IN_PLACE[node.target]
    graph.output(tuple(copies[n] for n in writes))
    return fx.GraphModule(torch.nn.Module(), graph)


def _unrisky(
    updates: Collection[fx.Node], partitioned: PartitionedGraph, gm: fx.GraphModule
) -> frozenset[fx.Node]:
    """The ``updates`` in place before which eager cannot have raised for what runs after them.

    What a region asks for is looked at before it writes.
    """
    order = {node: k for k, node in enumerate(gm.graph.nodes)}
    kept = set(updates)
    written: list[fx.Node] = []
    for step in partitioned.steps:
        if isinstance(step, Region) and (step.checks or step.flags):
            first = min(order[node] for node in step.demanding)
            kept -= {node for node in written if order[node] > first}
        written += [node for node in step.nodes if node in kept]
    return frozenset(kept)


def _interface(
    step: EagerStep, partitioned: PartitionedGraph, outputs: Sequence[fx.Node | RuntimeValue]
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


def _read(partitioned: PartitionedGraph, outputs: Sequence[fx.Node | RuntimeValue]) -> set[fx.Node]:
    """What steps read, or the caller."""
    found = _read_by_eager(partitioned)
    fx.node.map_arg(outputs, found.add)
    for region in partitioned.regions:
        found.update(region.inputs)
    return found


def _by_and_for_kernels(partitioned: PartitionedGraph) -> list[fx.Node]:
    """What regions compute and eager does not read."""
    read = _read_by_eager(partitioned)
    return [n for region in partitioned.regions for n in region.outputs if n not in read]


def _read_by_eager(partitioned: PartitionedGraph) -> set[fx.Node]:
    steps = (step for step in partitioned.steps if isinstance(step, EagerStep))
    return {a for step in steps for n in step.nodes for a in n.all_input_nodes}


def _last_uses(
    partitioned: PartitionedGraph, outputs: Sequence[fx.Node | RuntimeValue]
) -> dict[fx.Node, int]:
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
