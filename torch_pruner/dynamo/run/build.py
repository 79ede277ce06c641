"""From a ``Program`` to a ``GraphCall``: compile its regions, join the steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import torch

from torch_pruner import exc
from torch_pruner.compiler.drawn_masks import masks_entry
from torch_pruner.devices.openmp import crowded
from torch_pruner.dynamo.lower.bounds import guarded
from torch_pruner.dynamo.lower.program import Program, RegionStep
from torch_pruner.dynamo.run.failures import Fallback
from torch_pruner.dynamo.run.masks import MaskDrawer, draws, with_drawer
from torch_pruner.dynamo.run.narrow_call import NarrowRegionCall
from torch_pruner.dynamo.run.openmp import SmallOnOneThread, is_light
from torch_pruner.dynamo.run.packed_inputs import layouts_held
from torch_pruner.dynamo.run.runtime import GraphCall, GraphStep, RegionCall, profiled
from torch_pruner.graph.coded import NotCodedError
from torch_pruner.graph.lossless import narrowed, orders_of_copies
from torch_pruner.report import GraphReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import fx

    from torch_pruner.compiler.compiled import CompiledGraph
    from torch_pruner.compiler.driver import Compiler
    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.lower.calls import StepCall
    from torch_pruner.dynamo.lower.tensors import TensorSpec
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.layout import Order
    from torch_pruner.report import Tuning


@dataclass(frozen=True, slots=True)
class BuiltRegion:
    """A compiled region, and the numbers of the values that it reads."""

    call: RegionCall
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """A graph that runs, and what the report says about it."""

    call: GraphCall
    program: Program
    regions: tuple[BuiltRegion, ...]

    @property
    def compiled(self) -> tuple[CompiledGraph, ...]:
        return tuple(region.call.compiled for region in self.regions)

    def overwrite(self, written: Sequence[int]) -> None:
        """From now on write the first results over the inputs at these positions, where they are
        new values of, as far as the program can: once it was compared with eager."""
        if len(self.program.steps) != 1 or not self.regions:
            return
        (step,), (region,) = self.program.steps, self.regions
        does = cast("RegionStep", step.does)
        if type(region.call) is not RegionCall or does.checks or does.flags:
            return
        wanted = [number for number, _ in self.program.outputs[: len(written)]]
        pairs = {
            (step.writes.index(number), step.reads.index(position))
            for number, position in zip(wanted, written, strict=True)
            if number in step.writes and position in step.reads
        }
        region.call.overwrite(pairs)

    def report(
        self, name: str, seconds: dict[str, float], tunings: Sequence[Tuning] = ()
    ) -> GraphReport:
        program = self.program
        tasks = tuple(t for c in self.compiled for t in c.tasks)
        return GraphReport(
            name=name,
            ops_total=program.ops_total,
            ops_compiled=program.ops_compiled,
            flops_total=program.flops_total,
            flops_compiled=program.flops_compiled,
            regions=len(program.regions),
            ops_fallback=program.refused,
            tasks=tasks,
            seconds=seconds,
            trials=sum(t.trials for t in tasks if t.source in ("tuned", "library")),
            weight_bytes=sum(r.call.weight_bytes for r in self.regions),
            workspace_bytes=sum(c.plan.workspace_bytes for c in self.compiled),
            tunings=tuple(tunings),
            barriers=sum(c.barriers for c in self.compiled),
            notes=tuple(note for c in self.compiled for note in c.notes),
        )


def build_graph(
    program: Program,
    compiler: Compiler,
    device: Device,
    *,
    fallback: str = "eager",
    name: str = "graph",
    holds: Mapping[int, str] = MappingProxyType({}),
) -> BuiltGraph:
    """Compile the regions of ``program``; ``fallback`` runs the operators that were refused.

    ``device`` is that of the program's device, ``compiler`` is for it. ``holds``: the narrower
    dtypes that represent, at the moment, what float32 arguments at these positions hold.

    Raises ``UnsupportedModel`` if ``fallback`` is ``"error"`` and an operator was refused.
    """
    if fallback == "error" and program.refused:
        first = program.refused[0]
        raise exc.UnsupportedModel(name, f"{first.node}: {first.detail}", "allow fallback='eager'")
    regions: list[BuiltRegion] = []
    for step in program.steps:
        if isinstance(step.does, RegionStep):
            mine = held_by(step.reads, holds)
            call = built_region(step.does, compiler, device, f"{name}.{len(regions)}", mine)
            regions.append(BuiltRegion(call, step.reads))
    graph = joined(program, regions, compiler, device, fallback)
    return BuiltGraph(graph, program, tuple(regions))


def joined(
    program: Program,
    regions: Sequence[BuiltRegion],
    compiler: Compiler,
    device: Device,
    fallback: str,
) -> GraphCall:
    """The call of ``program`` whose regions were compiled as ``regions``, in order."""
    steps: list[GraphStep] = []
    made = iter(regions)
    drawer = _drawer(program, compiler) if fallback == "eager" and regions else None
    for step in program.steps:
        if isinstance(step.does, RegionStep):
            run, named = region_calls(next(made).call, step.does, device)
        else:
            does = step.does if drawer is None else with_drawer(step.does, drawer)
            run, named = eager_call(does, fallback), None
            if device.host_memory and program.regions and crowded() and is_light(step.does):
                run = SmallOnOneThread(run)
        steps.append(GraphStep(run, step.reads, step.writes, step.dead, named))
    return GraphCall(steps, program.n_values, program.constants, program.outputs)


def _drawer(program: Program, compiler: Compiler) -> MaskDrawer | None:
    """What draws masks of dropout for eager's steps; None where they draw none."""
    eager = (step.does for step in program.steps if not isinstance(step.does, RegionStep))
    if not any(draws(does) for does in eager):
        return None
    entry = masks_entry(compiler)
    return None if entry is None else MaskDrawer(entry)


def region_calls(call: RegionCall, region: RegionStep, device: Device) -> tuple[StepCall, StepCall]:
    """``call`` with all that its device and its operators' demands need around it.

    Once as it is, and once as ``torch.profiler`` is to see it.
    """
    checks = region.checks if device.checks_indices else ()
    run = cast("StepCall", call)  # what a region reads and writes are tensors
    plain, named = (
        guarded(cast("StepCall", device.guard(r)), checks, region.flags)
        for r in (run, profiled(call.name, run))
    )
    return plain, named


def held_by(reads: Sequence[int], holds: Mapping[int, str]) -> dict[int, str]:
    """What ``holds`` says of arguments, by positions of the inputs of a step that ``reads``."""
    return {k: holds[value] for k, value in enumerate(reads) if value in holds}


def as_narrow(
    graph: Graph, orders: Sequence[Order], compiler: Compiler, holds: Mapping[int, str]
) -> tuple[Graph, list[Order], dict[int, str]]:
    """What is compiled for a graph whose inputs hold so much: a graph, the memory orders of its
    inputs, and which of them became narrow. ``orders``: those of the tensors."""
    if not holds or not compiler.capabilities.mixed_operands:
        return graph, list(orders), {}
    made, narrow = narrowed(graph, holds)
    return made, orders_of_copies(made, narrow, orders), narrow


def built_region(
    region: RegionStep,
    compiler: Compiler,
    device: Device,
    name: str,
    holds: Mapping[int, str] = MappingProxyType({}),
) -> RegionCall:
    """A region, compiled; ``holds`` as for ``build_graph``, by positions of the region's inputs."""
    lie = [s.order for s in region.inputs]
    graph, orders, narrow = as_narrow(region.graph, lie, compiler, holds)
    held = layouts_held() if compiler.config.weights == "frozen" else ()
    compiled = compiler.compile(graph, orders, [s.order for s in region.outputs], held)
    if not narrow:
        return plain_call(region, compiled, device, name)
    specs, static = _ends(region, orders, compiled)
    # In the middle of a run nobody waits for tuning.
    later = compiler.config.replace(on_miss="fallback", time_budget_s=None)
    anew = partial(built_region, region, replace(compiler, config=later), device, name)

    def build(why: ValueError) -> RegionCall:
        return anew(narrow if isinstance(why, NotCodedError) else {})

    return NarrowRegionCall(
        name, compiled, *specs, static, device, narrow, region.graph, build,
        Fallback(name, compiler.config),
    )  # fmt: skip


def plain_call(
    region: RegionStep, compiled: CompiledGraph, device: Device, name: str
) -> RegionCall:
    """The call of a region that was compiled as it is."""
    specs, static = _ends(region, [s.order for s in region.inputs], compiled)
    return RegionCall(name, compiled, *specs, static, device)


def _ends(
    region: RegionStep, orders: Sequence[Order], compiled: CompiledGraph
) -> tuple[tuple[Sequence[TensorSpec], Sequence[TensorSpec]], list[int]]:
    """What goes in, in these memory orders, and comes out; and which inputs rarely change."""
    nodes = region.graph.nodes
    static = [k for k, i in enumerate(region.graph.inputs) if nodes[i].attr("static")]
    if compiled.weights == "live":  # what does not lie as kernels want it is copied at every call
        static = []
    inputs = [replace(s, order=o) for s, o in zip(region.inputs, orders, strict=True)]
    return (inputs, region.outputs), static


def eager_call(module: fx.GraphModule, fallback: str) -> StepCall:
    forward = module.forward
    if fallback == "inductor":
        inductor = torch.compile(module, backend="inductor", dynamic=False)
        return lambda values: inductor(*values)
    return lambda values: forward(*values)
