"""The last stage of tuning: cuts and kernels are judged inside the network, by whole calls.

After the first call of a graph that was just tuned at full effort, programs that are cut into
kernels otherwise, then programs with other schedules take turns with the one that is there, on the
inputs of that call. What makes the graph faster is kept and stored. Nothing else is: a program that
wins has to win once more in the end.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from torch_pruner.compiler.recut import Recut
from torch_pruner.compiler.rivals import Rivals, settle
from torch_pruner.dynamo.lower.program import RegionStep
from torch_pruner.dynamo.run.build import BuiltGraph, BuiltRegion, joined, plain_call
from torch_pruner.dynamo.run.checked import may_draw
from torch_pruner.dynamo.run.runtime import RegionCall
from torch_pruner.graph.cuts import STAGES
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from torch_pruner.compiler.compiled import CompiledGraph
    from torch_pruner.compiler.driver import Compiler
    from torch_pruner.compiler.rivals import Choices
    from torch_pruner.config import Config
    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.lower.calls import RuntimeValue
    from torch_pruner.dynamo.lower.program import Program

    Run = Callable[[], object]

log = logger(__name__)

SHARE = 0.2  # of a time budget
MOST_S = 60.0
SHORT_S = 10.0
TURN_S = 2e-2  # that the calls of a turn take, of which the least counts
WARM = 5  # calls before the first round: the first packs, and the next look at what was packed
ROUNDS = 9
LEAST = 4  # rounds before the slower one is sent home
AHEAD = 0.99  # times the incumbent's: what gains less is not told from chance
USUALLY = 0.75  # of the rounds
ROUND = 4  # calls of a round, where one fills a turn
THINKS = 0.4  # of the time for other cuts: to estimate what may be worth a race
LINK_S, BUILD_S = 0.4, 0.1  # of a program, and of each kernel that is built for it


def seconds_for(
    config: Config, gm: fx.GraphModule, program: Program, device: Device, *, writes: bool
) -> float:
    """How long kernels of a graph may be judged inside it; 0 for not at all.

    They are where a search at full effort may have left something open, and where calling the graph
    again does no harm: it ``writes`` into no input and draws no numbers.
    """
    wanted = config.effort == "full" and config.on_miss == "tune" and config.objective == "latency"
    if not wanted or not device.host_memory or device.builds_only:
        return 0.0
    # Originals that nobody reads any more may be freed; steps of inductor's are compiled each time.
    if config.weights == "frozen" or config.fallback == "inductor":
        return 0.0
    # Attention of eager's may draw. Compiled it does not, as no region does.
    eager = (s.does for s in program.steps if not isinstance(s.does, RegionStep))
    if writes or not program.regions or _writes(gm) or any(may_draw(does) for does in eager):
        return 0.0
    budget = config.budget
    if 0 in (budget.trials, budget.trials_per_task):
        return 0.0
    return MOST_S if budget.time_s is None else min(SHARE * budget.time_s, MOST_S)


def limited(seconds: float, spent_s: float) -> float:
    """``seconds``, but no more than all before took, if that was not short."""
    return min(seconds, max(spent_s, SHORT_S))


def leaving(config: Config, seconds: float) -> Config:
    """``config`` whose search leaves so much of the time that was asked for."""
    given = config.time_budget_s
    return config if given is None else config.replace(time_budget_s=given - seconds)


def _writes(gm: fx.GraphModule) -> bool:
    ops = (n.target for n in gm.graph.nodes if n.op == "call_function")
    return any(isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable for op in ops)


@dataclass(slots=True, eq=False)
class _Change:
    """What makes a region faster: other cuts, other kernels, both or nothing."""

    cuts: Recut | None = None
    rivals: Rivals | None = None
    choices: Choices = field(default_factory=dict)

    def __str__(self) -> str:
        told = [f"{len(self.cuts.lowered.cuts)} sites cut otherwise"] if self.cuts else []
        if self.rivals is not None:
            told.append(f"{_differ(self.rivals.chosen, self.choices)} kernels changed")
        return ", ".join(told)

    def keep(self) -> CompiledGraph:
        """The region's program, which later processes find. Raises ``CompileError``."""
        made = self.cuts.keep() if self.cuts is not None else None
        if self.rivals is not None:
            made = self.rivals.keep(self.choices)
        assert made is not None, "nothing changed"
        return made


@dataclass(frozen=True, slots=True, eq=False)
class NetworkFinals:
    """A graph that was built and ran once, and what it takes to build it with other kernels."""

    program: Program
    built: BuiltGraph
    compiler: Compiler
    device: Device
    label: str
    limit_s: float
    clock: Callable[[], float] = time.perf_counter

    def faster(
        self, args: Sequence[RuntimeValue], compared: Callable[[BuiltGraph], None]
    ) -> BuiltGraph | None:
        """The graph with the kernels that make it faster, called with ``args``; None: none do.

        Nothing is kept of what ``compared`` raises for. Raises ``CompileError``.
        """
        begin, now = self.clock(), self.built
        with torch.no_grad():
            round_s = ROUND * _turn(_run_of(now, args), 1, self.clock)
        # Most races are soon decided; the last one, of what won, takes all of its rounds.
        ends = begin + self.limit_s - round_s * (LEAST + ROUNDS)
        changed: list[tuple[int, _Change]] = []
        for position, region in enumerate(self.program.regions):
            if self.clock() >= ends:
                break
            now, change = self._changed(now, position, region, args, ends)
            if change.cuts is not None or change.rivals is not None:
                changed.append((position, change))
        # The best of several was lucky, too: it has to be faster at another moment.
        kept = bool(changed) and self._wins(now, self.built, args)
        seconds, verdict = self.clock() - begin, "kept" if kept else "not kept"
        told = "; ".join(str(change) for _, change in changed) or "nothing changed"
        log.info("%s: %s after %.1f s, %s", self.label, told, seconds, verdict)
        if not kept:
            return None
        compared(now)
        for position, change in changed:
            now = self._with(now, position, change.keep())
        return now

    def _changed(
        self,
        now: BuiltGraph,
        position: int,
        region: RegionStep,
        args: Sequence[RuntimeValue],
        ends: float,
    ) -> tuple[BuiltGraph, _Change]:
        """``now``, or the same with a region cut otherwise and other kernels in it; what changed.

        No race begins after ``ends``, as far as can be told.
        """
        call, change = now.regions[position].call, _Change()
        if type(call) is not RegionCall:  # one of narrow copies is another graph
            return now, change
        given = (region.graph, [s.order for s in region.inputs], [s.order for s in region.outputs])
        recut = Recut.of(self.compiler, *given, call.compiled.choices)
        if recut is None:
            return now, change
        now = self._recut(now, position, recut, args, self.clock() + (ends - self.clock()) / 2)
        change.cuts = recut if recut.changed else None
        compiler = replace(self.compiler, cuts=recut.lowered.cuts)
        rivals = Rivals.of(compiler, *given, recut.choices)
        if rivals is not None:
            now, choices = self._settled(now, position, rivals, args, ends)
            if choices != rivals.chosen:
                change.rivals, change.choices = rivals, choices
        return now, change

    def _recut(
        self,
        now: BuiltGraph,
        position: int,
        recut: Recut,
        args: Sequence[RuntimeValue],
        ends: float,
    ) -> BuiltGraph:
        """``now``, or the same with the region at ``position`` cut otherwise."""
        for kinds in STAGES:
            until = self.clock() + THINKS * (ends - self.clock())
            for other in recut.promising(kinds, partial(self._before, until)):
                if self.clock() >= ends:
                    return now
                if recut.lowered.cuts != other.base:
                    other = recut.with_sites(other.sites)
                choices = recut.chosen(other)
                rival = self._with(now, position, recut.compiled(other, choices))
                log.debug("%s: %s, estimated %.2f", self.label, other.kind, other.ratio)
                if self._wins(rival, now, args):
                    now = rival
                    recut.take(other, choices)
        return now

    def _before(self, until: float) -> bool:
        return self.clock() < until

    def _settled(
        self,
        now: BuiltGraph,
        position: int,
        rivals: Rivals,
        args: Sequence[RuntimeValue],
        ends: float,
    ) -> tuple[BuiltGraph, Choices]:
        """``now``, or the same with other kernels in the region at ``position``; its choices.

        No race begins after ``ends``, as far as can be told.
        """
        incumbent = now

        def wins(other: Choices, _: Choices) -> bool:
            nonlocal incumbent
            count, differ = rivals.unbuilt(other), _differ(rivals.chosen, other)
            rival = self._with(incumbent, position, rivals.compiled(other))
            log.debug("%s: %d other kernels, %d built now", self.label, differ, count)
            if not self._wins(rival, incumbent, args):
                return False
            incumbent = rival
            return True

        def affordable(other: Choices) -> bool:
            return self.clock() + LINK_S + rivals.unbuilt(other) * BUILD_S <= ends

        choices = settle(rivals, wins, affordable)
        return incumbent, choices

    def _with(self, built: BuiltGraph, position: int, compiled: CompiledGraph) -> BuiltGraph:
        """``built`` with another program in one of its regions."""
        regions, own = list(built.regions), f"{self.label}.{position}"
        call = plain_call(self.program.regions[position], compiled, self.device, own)
        regions[position] = BuiltRegion(call, regions[position].reads)
        fallback = self.compiler.config.fallback
        joint = joined(self.program, regions, self.compiler, self.device, fallback)
        return BuiltGraph(joint, self.program, tuple(regions))

    def _wins(self, rival: BuiltGraph, incumbent: BuiltGraph, args: Sequence[RuntimeValue]) -> bool:
        with torch.no_grad():
            return wins(_run_of(rival, args), _run_of(incumbent, args), self.clock)


def _differ(one: Choices, other: Choices) -> int:
    return sum(one[w].candidate != other[w].candidate for w in one)


def _run_of(built: BuiltGraph, args: Sequence[RuntimeValue]) -> Run:
    return lambda: built.call(list(args))


def wins(rival: Run, incumbent: Run, clock: Callable[[], float] = time.perf_counter) -> bool:
    """Whether ``rival`` takes less time, by more than chance and in most turns.

    They take turns; each is called once untimed first, so that it finds its own in the caches. Of a
    turn's calls the least counts, since what disturbs one makes it longer. One that is not ahead
    after a few rounds is not given more.
    """
    for _ in range(WARM):
        rival()
    calls = max(1, round(TURN_S / max(_turn(incumbent, 1, clock), 1e-9)))
    ratios: list[float] = []
    for k in range(ROUNDS):
        first, second = (rival, incumbent) if k % 2 else (incumbent, rival)
        times = {run: _turn(run, calls, clock) for run in (first, second)}
        ratios.append(times[rival] / times[incumbent])
        if k + 1 >= LEAST and statistics.median(ratios) > 1.0:
            break
    middle, ahead = statistics.median(ratios), sum(ratio < 1.0 for ratio in ratios)
    log.debug("%.3f of the time, ahead in %d of %d rounds", middle, ahead, len(ratios))
    return middle <= AHEAD and ahead >= USUALLY * ROUNDS


def _turn(run: Run, calls: int, clock: Callable[[], float]) -> float:
    """Seconds of the shortest call."""
    run()
    least = math.inf
    for _ in range(calls):
        begin = clock()
        run()
        least = min(least, clock() - begin)
    return least
