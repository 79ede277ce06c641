"""The regions of a graph as buckets: compiled once, and called for smaller sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_pruner.dynamo.lower.bounds import guarded
from torch_pruner.dynamo.lower.program import Program, ProgramStep, RegionStep
from torch_pruner.dynamo.lower.tensors import TensorSpec
from torch_pruner.dynamo.run import reports
from torch_pruner.dynamo.run.build import (
    BuiltGraph,
    BuiltRegion,
    built_region,
    eager_call,
    held_by,
    region_calls,
)
from torch_pruner.dynamo.run.row_copies import RowCopier
from torch_pruner.dynamo.run.runtime import GraphCall, GraphStep
from torch_pruner.dynamo.sizes.padded_region import PaddedRegion, Spare, with_room
from torch_pruner.graph.bucket import COUNT_DTYPE, Bucket
from torch_pruner.log import PhaseTimer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.config import Config
    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.lower.calls import StepCall
    from torch_pruner.dynamo.run.runtime import RegionCall

__all__ = ["Inner", "compiled", "joined"]

COUNT = getattr(torch, COUNT_DTYPE)


@dataclass(frozen=True, slots=True)
class Inner:
    """A region that others call, and what copies results of it."""

    run: StepCall
    copier: RowCopier | None


def _inner(call: RegionCall, region: RegionStep, device: Device, threads: int) -> Inner:
    """Asks itself whether ``torch.profiler`` is on."""
    run, named = region_calls(call, region, device)
    profiler = torch.autograd.profiler
    copies = call.compiled.copies
    return Inner(
        lambda inputs: (named if profiler._is_profiler_enabled else run)(inputs),
        None if copies is None else RowCopier(copies, threads),
    )


def compiled(
    buckets: Sequence[Bucket],
    wide: Program,
    name: str,
    config: Config,
    device: Device,
    holds: Mapping[int, str],
) -> list[Inner]:
    """Every region of ``wide`` with its bucket's graph in place of its own.

    ``holds`` as for ``build_graph``. What was compiled is reported.
    """
    timer = PhaseTimer()
    compiler = device.compiler(config, timer)
    count = TensorSpec.make((), (), COUNT)
    runs: list[Inner] = []
    steps, built, left = list[ProgramStep](), list[BuiltRegion](), iter(buckets)
    for step in wide.steps:
        does = step.does
        if isinstance(does, RegionStep):
            bucket = next(left)
            does = with_room(does, bucket.graph)
            inputs = (*does.inputs, *(count,) * len(bucket.counts))
            does = replace(does, graph=bucket.graph, inputs=inputs, checks=(), flags=())
            mine = held_by(step.reads, holds)
            region = built_region(does, compiler, device, f"{name}.{len(runs)}", mine)
            runs.append(_inner(region, does, device, compiler.context.threads))
            built.append(BuiltRegion(region, step.reads))
        steps.append(replace(step, does=does))
    program = replace(wide, steps=tuple(steps))
    call = GraphCall((), program.n_values, {}, ())  # never called: what it does is reported
    graph = BuiltGraph(call, program, tuple(built))
    reports.add(graph.report(name, dict(timer.seconds), compiler.tunings))
    return runs


def joined(
    buckets: Sequence[Bucket],
    runs: Sequence[Inner],
    wide: Program,
    small: Program,
    spare: Spare,
    device: Device,
    fallback: str,
) -> GraphCall:
    """The ``small`` program with its regions computed by ``runs``, which are those of ``wide``."""
    steps: list[GraphStep] = []
    regions = zip(buckets, runs, wide.regions, strict=True)
    for step in small.steps:
        run: StepCall
        if isinstance(step.does, RegionStep):
            bucket, own, large = next(regions)
            with _disable_current_modes():  # a capture has one of fake tensors
                counts = [
                    torch.tensor(n, dtype=COUNT, device=small.device) for _, n in bucket.counts
                ]
            checks = step.does.checks if device.checks_indices else ()
            roomy = with_room(large, bucket.graph)
            padding = PaddedRegion(own.run, roomy, step.does, counts, spare, own.copier)
            run = guarded(padding, checks, step.does.flags)
        else:
            run = eager_call(step.does, fallback)
        steps.append(GraphStep(run, step.reads, step.writes, step.dead))
    return GraphCall(steps, small.n_values, small.constants, small.outputs)
