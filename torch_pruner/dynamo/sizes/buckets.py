"""A size that came for the first time, in kernels for a larger one.

Compiling a size takes seconds, and sizes may come once. So where a graph was compiled for a larger
size, the smaller one runs in a program for both (``graph/bucket.py``): inputs are padded, sums are
masked, results are cut. That program is compiled once for the larger size; every smaller one that
comes is captured (a tenth of a second) and compared with it, operator by operator, before it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_pruner import exc
from torch_pruner.compiler import kernels
from torch_pruner.devices import device_for, torch_device_of
from torch_pruner.dynamo.lower.program import Program, RegionStep, describe
from torch_pruner.dynamo.run.build import as_narrow, held_by
from torch_pruner.dynamo.run.checked import CheckedCall, bound_of_weights, run_eager
from torch_pruner.dynamo.run.first_call import FirstCall
from torch_pruner.dynamo.run.graphs import one_at_a_time
from torch_pruner.dynamo.sizes import symbolic
from torch_pruner.dynamo.sizes.bucket_programs import Inner, compiled, joined
from torch_pruner.dynamo.sizes.every_size import EverySize, Sample, whole
from torch_pruner.dynamo.sizes.formulas import Formulas, expressions_of, grains_of
from torch_pruner.dynamo.sizes.padded_region import Spare, bucket_of
from torch_pruner.dynamo.sizes.shared_programs import (
    Capture,
    SharedProgram,
    adopted,
    alike,
    offer,
    offered,
)
from torch_pruner.dynamo.sizes.varying import reached, samples_of, stretched, ways_to_vary
from torch_pruner.graph.bucket import Bucket, NotAlikeError
from torch_pruner.log import PhaseTimer, logger

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import sympy
    import torch
    from torch import fx

    from torch_pruner.config import Config
    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.capture.aot_metadata import AotMetadata
    from torch_pruner.dynamo.lower.calls import BoxedCall
    from torch_pruner.dynamo.run.runtime import GraphCall
    from torch_pruner.dynamo.sizes.symbolic import SizedArguments
    from torch_pruner.dynamo.sizes.varying import Varying

    _Sizes = tuple[object, ...]  # of each argument its shape, or what it is


__all__ = ["Buckets"]

log = logger(__name__)
MOST_PROGRAMS = 8  # programs for several sizes that a graph has
MOST_SHARED = 4  # programs for every size that a graph has
MOST_REFUSED = 3  # times that sizes are compared without success


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
        given: Mapping[int, weakref.ref[torch.Tensor]] = MappingProxyType({}),
    ) -> None:
        """``holds`` as for ``build_graph``; ``given`` as for ``Capture``."""
        self._holds = holds
        self._capture = Capture(gm, lambda args: self._described(args)[1], given)
        self._gm, self._metadata, self._config, self._label = gm, metadata, config, label
        self._large: dict[_Sizes, Program] = {}  # by the sizes of the arguments
        self._runs: dict[tuple[Sequence[object], ...], list[Inner]] = {}
        self._spare = Spare()
        self._shared: list[_Shared] = []  # the smallest first
        self._latest: tuple[_Sizes, fx.GraphModule, Program] | None = None
        self._refused = 0

    @cached_property
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

    def known(self, args: SizedArguments) -> BoxedCall | None:
        """A call for sizes as those of ``args`` in a program for every size that is there."""
        symbols = symbolic.symbols_of(self._gm, args)
        for shared in self._shared:
            if shared.sizes.covers(symbols):
                return self._shared_call(shared, symbols)
        return None

    def shared(self, args: SizedArguments, config: Config | None = None) -> BoxedCall | None:
        """A call for sizes as those of ``args`` in the program for every size up to some.

        Compiled under ``config`` (None: as all others) if there is none for these, or none that was
        compiled so. None if the graph does not allow it, or has enough of them.
        """
        symbols = symbolic.symbols_of(self._gm, args)
        again = config is not None and config != self._config
        for shared in [] if again else self._shared:
            if shared.sizes.covers(symbols):
                return self._shared_call(shared, symbols)
        expressions = self._expressions
        if not self._usable or expressions is None or len(self._shared) >= MOST_SHARED:
            return None
        self._expressions = None  # unless it succeeds
        try:
            call = self._adopt(args, expressions, config or self._config)
            call = call or self._share(args, expressions, config or self._config)
        except (NotAlikeError, exc.CacheMiss) as err:
            log.debug("%s is compiled for each size: %s", self._label, err)
            return None
        self._expressions = expressions
        return call

    @cached_property
    def _expressions(self) -> set[sympy.Expr] | None:
        return expressions_of(self._gm)

    @one_at_a_time
    def _adopt(
        self, args: SizedArguments, expressions: set[sympy.Expr], config: Config
    ) -> BoxedCall | None:
        """A call in a program of another capture that was compiled under ``config``."""
        if not self._capture.given:
            return None
        weights = self._capture.weights_of(self._captured(args)[1])
        for host in offered(weights, config):
            if all(host is not s.program for s in self._shared):
                sizes = adopted(host, self._capture, args, expressions)
                if sizes is not None:
                    return self._kept(_Shared(sizes, host), symbolic.symbols_of(self._gm, args))
        return None

    @one_at_a_time
    def _share(
        self, args: SizedArguments, expressions: set[sympy.Expr], config: Config
    ) -> BoxedCall | None:
        symbols = symbolic.symbols_of(self._gm, args)
        sizes, wide = self._every_size(args, symbols, expressions)
        text = ",".join(map(str, sizes.most.values()))
        name, weights = f"{self._label}[..{text}]", self._capture.weights_of(wide)
        runs = self._compiled(sizes.buckets, wide, name, config)
        program = SharedProgram(wide, sizes.buckets, runs, name, config, self._spare, weights)
        return self._kept(_Shared(sizes, program), symbols, made=True)

    def _kept(
        self, shared: _Shared, symbols: Mapping[Hashable, int], *, made: bool = False
    ) -> BoxedCall | None:
        # A list of its own: other threads may go through it.
        others = [s for s in self._shared if s.sizes.most != shared.sizes.most]
        self._shared = sorted([*others, shared], key=lambda s: math.prod(s.sizes.most.values()))
        return self._shared_call(shared, symbols, made=made)

    def _every_size(
        self, args: SizedArguments, symbols: Mapping[Hashable, int], expressions: set[sympy.Expr]
    ) -> tuple[EverySize, Program]:
        """The graph at every size, and at the largest. Raises ``NotAlikeError``."""
        refused: Exception = NotAlikeError("sizes that do not vary")
        allows = partial(symbolic.allows, self._gm)
        for varying in ways_to_vary(symbols, allows):
            most = reached(symbols, varying, symbolic.most_of(self._gm), allows)
            guards = partial(symbolic.guards_allow, self._gm)
            far = stretched(symbols, varying, most, guards)
            for room in [most] if far == most else [far, most]:
                try:
                    return self._varied(args, symbols, varying, room, expressions)
                except (
                    NotAlikeError,
                    ValueError,
                    RuntimeError,
                ) as err:  # torch's, where they clash
                    log.debug("%s does not vary so: %s", self._label, err)
                    refused = err
        raise NotAlikeError(str(refused))

    def _varied(
        self,
        args: SizedArguments,
        symbols: Mapping[Hashable, int],
        varying: Varying,
        most: Mapping[Hashable, int],
        expressions: set[sympy.Expr],
    ) -> tuple[EverySize, Program]:
        gm, samples = self._gm, list[Sample]()
        room = [shared.sizes.most for shared in self._shared]
        growing, grains = symbolic.growing_in(gm), grains_of(expressions, varying)
        for numbers in samples_of(symbols, varying, most, room, growing, grains):
            given = symbolic.with_symbols(gm, args, numbers)
            if given is None:
                raise NotAlikeError("sizes that no argument has")
            samples.append(Sample(numbers, self._described(given)[1]))
        large, *small = samples
        wide = large.program
        if not wide.regions or any(_wiring(s.program) != _wiring(wide) for s in small):
            raise NotAlikeError("programs of different steps")
        buckets = [
            [bucket_of(a, b) for a, b in zip(wide.regions, one.program.regions, strict=True)]
            for one in small
        ]
        formulas = Formulas(expressions, [s.symbols for s in samples], varying)
        every = [whole(buckets[0]), *buckets]
        sizes = EverySize(formulas, varying, large.symbols, samples, every)
        known = sizes.at(symbolic.symbols_of(gm, args))
        if known is not None and not alike(known[0], self._captured(args)[1]):
            raise NotAlikeError("another graph at the size that came")
        return sizes, wide

    def _shared_call(
        self, shared: _Shared, symbols: Mapping[Hashable, int], *, made: bool = False
    ) -> BoxedCall | None:
        """``made``: just now."""
        if (found := shared.sizes.at(symbols)) is None:
            return None
        (small, buckets), program = found, shared.program
        call = self._joined(buckets, program.runs, program.wide, small, program.spare)
        checked = made and program.config.check == "first-call"
        if made and not checked:
            offer(program)
        return self._guarded(
            self._gm, call, program.name, checked=checked, on_match=partial(offer, program)
        )

    def _guarded(
        self,
        graph: fx.GraphModule,
        call: BoxedCall,
        name: str,
        *,
        checked: bool,
        on_match: Callable[[], None] = lambda: None,
    ) -> BoxedCall:
        """``call`` with eager behind it; ``checked``: compared with it first."""

        def failed(_: Exception) -> None:
            self._refused, self._shared = MOST_REFUSED, []

        if not checked:
            return FirstCall(
                partial(run_eager, graph), call, name, strict=self._config.strict,
                failed=failed, device=self._device,
            )  # fmt: skip
        return CheckedCall(
            graph, call, name, strict=self._config.strict, failed=failed,
            on_match=on_match, device=self._device,
            least_bound=bound_of_weights(self._config.rounded_bits),
        )  # fmt: skip

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
        if self._config.on_miss == "error":  # nothing is built: what there is are the size's own
            buckets = [bucket.padded() for bucket in buckets]
        key = (_key(large), *(bucket.graph.digest() for bucket in buckets))
        new = key not in self._runs
        if new:
            if len(self._runs) >= MOST_PROGRAMS:
                return None
            self._runs[key] = self._compiled(buckets, wide, name, self._config)
        call = self._joined(buckets, self._runs[key], wide, small, self._spare)
        return self._guarded(graph, call, name, checked=new and self._config.check == "first-call")

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

    def _compiled(
        self, buckets: Sequence[Bucket], wide: Program, name: str, config: Config
    ) -> list[Inner]:
        return compiled(buckets, wide, name, config, self._device, self._holds)

    def _joined(
        self, buckets: Sequence[Bucket], runs: Sequence[Inner], wide: Program, small: Program,
        spare: Spare,
    ) -> GraphCall:  # fmt: skip
        device, fallback = self._device, self._config.fallback
        return joined(buckets, runs, wide, small, spare, device, fallback)


@dataclass(frozen=True, slots=True)
class _Shared:
    """A program for every size, and what this graph is in it at each."""

    sizes: EverySize
    program: SharedProgram


def _wiring(program: Program) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """Which steps a program has, and which values they and it read, write and return."""
    steps = tuple((isinstance(s.does, RegionStep), s.reads, s.writes) for s in program.steps)
    return steps, tuple(number for number, _ in program.outputs)


def _key(args: SizedArguments) -> _Sizes:
    return tuple(getattr(a, "shape", a) for a in args)
