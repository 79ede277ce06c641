"""Other schedules for the kernels of a graph that was tuned, and the graph with these in place.

Kernels are tuned alone. Inside a network one finds its weights in other caches, its operands where
other schedules left them, and its thread where another was done late; of two that are as fast alone
one may cost the network more. Who can call the network asks here for the graph with other choices,
and says which it keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.compiler import drafting, kernels
from torch_pruner.compiler.building.kept import KeptKernels, Scratch
from torch_pruner.compiler.remembered import history

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_pruner.compiler.choice import Choice
    from torch_pruner.compiler.compiled import CompiledGraph
    from torch_pruner.compiler.driver import Compiler
    from torch_pruner.compiler.lowered import Lowered
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.layout import Order
    from torch_pruner.task import Candidate

    Choices = Mapping[str, Choice]  # by workload

ABOUT = 1.1  # times the chosen one's latency alone: what takes longer is no rival, drafts apart
LONG = 0.05  # of the graph's time: such kernels are looked at one by one
SHORT = 0.1  # of the graph's time that shorter ones have together: less is not seen in a call


@dataclass(frozen=True, slots=True, eq=False)
class Rivals:
    """The kernels that a search has just chosen, and others that it measured.

    ``ways`` are choices for all kernels or some: what was chosen, the drafts, the second best.
    ``seconds`` are those of all calls of a kernel, as it was measured alone.
    """

    compiler: Compiler
    lowered: Lowered
    chosen: Choices
    ways: Sequence[Choices]
    seconds: Mapping[str, float]
    _scratch: Scratch = field(repr=False)

    @staticmethod
    def of(
        compiler: Compiler,
        graph: Graph,
        inputs: Sequence[Order],
        outputs: Sequence[Order],
        chosen: Choices,
    ) -> Rivals | None:
        """Those of ``graph``, as ``compiler`` compiled it; None where nothing has a rival."""
        tuned = {w: c for w, c in chosen.items() if c.source == "tuned" and c.latency_s < math.inf}
        if not tuned:
            return None
        lowered = compiler.lower(graph, inputs, outputs)
        if any(task.workload not in chosen for task in lowered.tasks):
            return None
        drafts: dict[str, Choice] = {}
        seconds_best: dict[str, Choice] = {}
        drafted = drafting.together(lowered.tasks)
        for task in (t for t in lowered.tasks if t.workload in tuned):
            mine = tuned[task.workload]
            key = compiler.context.kernel_key(task.workload)
            measured = history.measured(
                compiler.store, key, lambda c: kernels.usable(c, compiler.config)
            )
            draft = drafted[task.workload]
            if draft in measured and draft != mine.candidate:
                drafts[task.workload] = _instead(mine, draft, measured[draft])
            limit_s = ABOUT * measured.get(mine.candidate, mine.latency_s)
            others = {c: s for c, s in measured.items() if c not in (mine.candidate, draft)}
            second = min(others, key=lambda c: others[c], default=None)
            if second is not None and others[second] <= limit_s:
                seconds_best[task.workload] = _instead(mine, second, others[second])
        ways = [way for way in (drafts, seconds_best) if way]
        if not ways:
            return None
        spent = {t.workload: t.weight * chosen[t.workload].latency_s for t in lowered.tasks}
        known = {w: s for w, s in spent.items() if s < math.inf}
        scratch = Scratch(KeptKernels(compiler.store, compiler.context))
        return Rivals(compiler, lowered, dict(chosen), [tuned, *ways], known, scratch)

    def groups(self) -> list[tuple[str, ...]]:
        """What to change together, by workload: all; the long ones, the longest first; then short
        ones in groups that are seen in the time of a call."""
        whole = sum(self.seconds.values())
        order = sorted(self.seconds, key=lambda w: -self.seconds[w])
        groups, group = [tuple(order)] if order else [], list[str]()
        for workload in order:
            group.append(workload)
            share = sum(self.seconds[w] for w in group) / whole
            if share >= SHORT or (len(group) == 1 and share >= LONG):
                groups.append(tuple(group))
                group = []
        return [*groups, tuple(group)] if group else groups

    def compiled(self, choices: Choices) -> CompiledGraph:
        """The graph with these kernels, to be looked at and not kept. Raises ``CompileError``."""
        return replace(self.compiler, scratch=self._scratch).linked(self.lowered, choices)

    def unbuilt(self, choices: Choices) -> int:
        """How many kernels would have to be built for ``compiled``."""
        kernels_of = self.lowered.scheduled(choices)
        generated = (w for w in kernels_of if families.named(choices[w].sketch).generated)
        return sum(self._scratch.find(w, kernels_of[w]) is None for w in generated)

    def keep(self, choices: Choices) -> CompiledGraph:
        """The graph with these kernels, which later processes find. Raises ``CompileError``."""
        store, context = self.compiler.store, self.compiler.context
        for task in self.lowered.tasks:
            choice = choices[task.workload]
            if choice.candidate == self.chosen[task.workload].candidate:
                continue
            known = history.finalists(store, context.kernel_key(task.workload))
            kernels.publish(
                task, choice, store, context, effort=choice.effort, chosen=True, finalists=known
            )
        self._scratch.taken(self.lowered.scheduled(choices))
        return self.compiler.linked(self.lowered, choices)


def settle(
    rivals: Rivals, wins: Callable[[Choices, Choices], bool], affordable: Callable[[Choices], bool]
) -> Choices:
    """The choices that are left when every group of kernels was tried every way.

    ``wins(other, best)`` says whether the network is faster with ``other``, which is asked of what
    is ``affordable``.
    """
    best = dict(rivals.chosen)
    tried = {_name(best)}
    for group in rivals.groups():
        for way in rivals.ways:
            other = best | {w: way[w] for w in group if w in way}
            if _name(other) in tried or not affordable(other):
                continue
            tried.add(_name(other))
            if wins(other, best):
                best = other
    return best


def _name(choices: Choices) -> frozenset[tuple[str, str]]:
    return frozenset((workload, choice.digest) for workload, choice in choices.items())


def _instead(mine: Choice, candidate: Candidate, latency_s: float) -> Choice:
    return replace(mine, candidate=candidate, latency_s=latency_s)
