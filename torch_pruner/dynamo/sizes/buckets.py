"""A size that came for the first time, in kernels for a larger one.

Compiling a size takes seconds, and sizes may come once. So where a graph was compiled for a larger
size, the smaller one runs in a program for both (``graph/bucket.py``): inputs are padded, sums are
masked, results are cut. That program is compiled once for the larger size; every smaller one that
comes is captured (a tenth of a second) and compared with it, operator by operator, before it runs.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from torch_pruner import exc
from torch_pruner.compiler import kernels
from torch_pruner.devices import device_for, torch_device_of
from torch_pruner.dynamo.lower.bounds import guarded
from torch_pruner.dynamo.lower.program import Program, ProgramStep, RegionStep, describe
from torch_pruner.dynamo.lower.tensors import TensorSpec
from torch_pruner.dynamo.run import reports
from torch_pruner.dynamo.run.build import (
    BuiltGraph,
    BuiltRegion,
    as_narrow,
    built_region,
    eager_call,
    held_by,
    region_calls,
)
from torch_pruner.dynamo.run.checked import CheckedCall, bound_of_weights, run_eager
from torch_pruner.dynamo.run.first_call import FirstCall
from torch_pruner.dynamo.run.graphs import one_at_a_time
from torch_pruner.dynamo.run.runtime import GraphCall, GraphStep
from torch_pruner.dynamo.sizes import symbolic
from torch_pruner.dynamo.sizes.padded_region import PaddedRegion, Spare, bucket_of, with_room
from torch_pruner.graph.bucket import COUNT_DTYPE, Bucket, NotAlikeError
from torch_pruner.log import PhaseTimer, logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import fx

    from torch_pruner.config import Config
    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.capture.aot_metadata import AotMetadata
    from torch_pruner.dynamo.lower.calls import BoxedCall, StepCall
    from torch_pruner.dynamo.run.runtime import RegionCall
    from torch_pruner.dynamo.sizes.symbolic import SizedArguments

    _Sizes = tuple[object, ...]  # of each argument its shape, or what it is


__all__ = ["Buckets"]

log = logger(__name__)
MOST_PROGRAMS = 8  # programs for several sizes that a graph has
MOST_REFUSED = 3  # times that sizes are compared without success
COUNT = getattr(torch, COUNT_DTYPE)


class Buckets:
    """The programs of one graph of symbolic sizes that compute smaller sizes than their own.

    ``config`` says how their kernels are chosen. Not safe for several threads: its caller is.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        metadata: AotMetadata,
        config: Config,
        label: str,
        holds: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """``holds`` as for ``build_graph``."""
        self._holds = holds
        self._gm, self._metadata, self._config, self._label = gm, metadata, config, label
        self._large: dict[_Sizes, Program] = {}  # by the sizes of the arguments
        self._runs: dict[tuple[Sequence[object], ...], list[StepCall]] = {}
        self._spare = Spare()
        self._latest: tuple[_Sizes, fx.GraphModule, Program] | None = None
        self._refused = 0

    @functools.cached_property
    def _device(self) -> Device:
        return device_for(torch_device_of(self._gm), self._config)

    @property
    def _usable(self) -> bool:
        # What leaves a forward for its backward, and inputs that are written, are not cut.
        plain = self._metadata.kind == "inference" and not self._metadata.mutated
        return plain and self._refused < MOST_REFUSED and not self._device.builds_only

    def call(self, args: SizedArguments, large: SizedArguments, text: str) -> BoxedCall | None:
        """A call for sizes as those of ``args`` in the program for those of ``large``.

        None where there is none: the graph does not allow it, or has enough of such programs.
        ``text`` names the larger sizes.
        """
        if not self._usable:
            return None
        self._refused += 1  # unless it succeeds, whatever goes wrong
        try:
            found = self._call(args, large, text)
        except (NotAlikeError, exc.CacheMiss) as err:
            log.debug("sizes of %s are not computed at larger ones: %s", self._label, err)
            return None
        self._refused -= 1
        return found

    def ready(self, args: SizedArguments) -> bool:
        """Whether the cache has the kernels for sizes as those of ``args``."""
        if not self._usable:
            return False
        compiler = self._device.compiler(self._config, PhaseTimer())
        steps = self._captured(args)[1].steps
        regions = [(s.does, s.reads) for s in steps if isinstance(s.does, RegionStep)]
        for region, reads in regions:
            lie = [s.order for s in region.inputs]
            held = held_by(reads, self._holds)
            graph, orders, _ = as_narrow(region.graph, lie, compiler, held)
            tasks = compiler.lower(graph, orders, [s.order for s in region.outputs]).tasks
            found = kernels.look_up(tasks, compiler.config, compiler.store, compiler.context)
            if len(found) < len(tasks):
                return False
        return bool(regions)

    @one_at_a_time
    def _call(self, args: SizedArguments, large: SizedArguments, text: str) -> BoxedCall | None:
        (graph, small), wide = self._captured(args), self._known(large)
        name = f"{self._label}[..{text}]"
        if _wiring(small) != _wiring(wide) or not small.regions:
            raise NotAlikeError("programs of different steps")
        buckets = [bucket_of(a, b) for a, b in zip(wide.regions, small.regions, strict=True)]
        key = (_key(large), *(bucket.graph.digest() for bucket in buckets))
        new = key not in self._runs
        if new:
            if len(self._runs) >= MOST_PROGRAMS:
                return None
            self._runs[key] = self._compiled(buckets, wide, name)
        call = self._joined(buckets, self._runs[key], wide, small)

        def failed(_: Exception) -> None:
            self._refused = MOST_REFUSED

        if not new or self._config.check != "first-call":
            return FirstCall(
                functools.partial(run_eager, graph), call, name, strict=self._config.strict,
                failed=failed, device=self._device,
            )  # fmt: skip
        return CheckedCall(
            graph, call, name, strict=self._config.strict, failed=failed,
            device=self._device, least_bound=bound_of_weights(self._config.rounded_bits),
        )  # fmt: skip

    def _joined(
        self, buckets: Sequence[Bucket], runs: Sequence[StepCall], wide: Program, small: Program
    ) -> GraphCall:
        """The small program with its regions computed by ``runs``."""
        steps: list[GraphStep] = []
        regions = zip(buckets, runs, wide.regions, strict=True)
        for step in small.steps:
            run: StepCall
            if isinstance(step.does, RegionStep):
                bucket, inner, large = next(regions)
                counts = [
                    torch.tensor(n, dtype=COUNT, device=small.device) for _, n in bucket.counts
                ]
                checks = step.does.checks if self._device.checks_indices else ()
                roomy = with_room(large, bucket.graph)
                padding = PaddedRegion(inner, roomy, step.does, counts, self._spare)
                run = guarded(padding, checks, step.does.flags)
            else:
                run = eager_call(step.does, self._config.fallback)
            steps.append(GraphStep(run, step.reads, step.writes, step.dead))
        return GraphCall(steps, small.n_values, small.constants, small.outputs)

    def _captured(self, args: SizedArguments) -> tuple[fx.GraphModule, Program]:
        """The graph for these sizes, and it as a program; the last one is kept."""
        key = _key(args)
        if self._latest is None or self._latest[0] != key:
            self._latest = key, *self._described(args)
        return self._latest[1:]

    def _described(self, args: SizedArguments) -> tuple[fx.GraphModule, Program]:
        graph, metadata = symbolic.with_sizes(self._gm, args), self._metadata
        device, dtypes = self._device.device, self._device.dtypes
        return graph, describe(
            graph, static=metadata.static, loose=metadata.loose, device=device, dtypes=dtypes
        )

    def _known(self, large: SizedArguments) -> Program:
        key = _key(large)
        if key not in self._large:
            self._large[key] = self._described(large)[1]
        return self._large[key]

    def _compiled(self, buckets: Sequence[Bucket], wide: Program, name: str) -> list[StepCall]:
        """Every region of ``wide`` with its bucket's graph in place of its own."""
        timer = PhaseTimer()
        compiler = self._device.compiler(self._config, timer)
        count = TensorSpec.make((), (), COUNT)
        runs: list[StepCall] = []
        steps, built, left = list[ProgramStep](), list[BuiltRegion](), iter(buckets)
        for step in wide.steps:
            does = step.does
            if isinstance(does, RegionStep):
                bucket = next(left)
                does = with_room(does, bucket.graph)
                inputs = (*does.inputs, *(count,) * len(bucket.counts))
                does = replace(does, graph=bucket.graph, inputs=inputs, checks=(), flags=())
                mine = held_by(step.reads, self._holds)
                region = built_region(does, compiler, self._device, f"{name}.{len(runs)}", mine)
                runs.append(_inner(region, does, self._device))
                built.append(BuiltRegion(region, step.reads))
            steps.append(replace(step, does=does))
        program = replace(wide, steps=tuple(steps))
        call = GraphCall((), program.n_values, {}, ())  # never called: what it does is reported
        graph = BuiltGraph(call, program, tuple(built))
        reports.add(graph.report(name, dict(timer.seconds), compiler.tunings))
        return runs


def _inner(call: RegionCall, region: RegionStep, device: Device) -> StepCall:
    """A region that others call: it asks itself whether ``torch.profiler`` is on."""
    run, named = region_calls(call, region, device)
    profiler = torch.autograd.profiler
    return lambda inputs: (named if profiler._is_profiler_enabled else run)(inputs)


def _wiring(program: Program) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """Which steps a program has, and which values they and it read, write and return."""
    steps = tuple((isinstance(s.does, RegionStep), s.reads, s.writes) for s in program.steps)
    return steps, tuple(number for number, _ in program.outputs)


def _key(args: SizedArguments) -> _Sizes:
    return tuple(getattr(a, "shape", a) for a in args)
