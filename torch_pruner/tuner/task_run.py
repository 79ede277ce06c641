"""One task of a tuning session: what is known of it, and which of its schedules are best.

In: results as they come. Out: the task's outcome. Measures nothing.

The objective has a say in who is raced, not in who wins: the best schedule is the fastest, whatever
the objective, and the finalists are told with what they cost, for whoever chooses among them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch_pruner.pareto import LATENCY, TIE, Finalist, Objective, as_fast, non_dominated
from torch_pruner.task import Candidate, MeasureResult, MeasureStatus, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.pareto import Footprint
    from torch_pruner.tuner.scheduler import TaskProgress
    from torch_pruner.tuner.search.base import SearchStrategy

FINALISTS = 8
LEAN = 3  # of them, those that an objective has more use for than the fastest
ABOUT = 1.1  # times the fastest, as batches measure it: a race may find it as fast
LOOKED_AT = 64  # schedules about as fast as the fastest whose cost is asked for
BUDGET = "budget used up"


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What tuning found for one task; ``best`` is None when nothing was measured or worked."""

    task: Task
    best: MeasureResult | None
    draft: Candidate | None  # the first choice before anything was measured
    first_s: float  # latency of the best of the first batch; infinite where there is none
    trials: int
    failed: int
    stopped: str
    finalists: tuple[Finalist, ...] = ()  # of which no other is better in everything

    @property
    def exhausted(self) -> bool:
        """Whether the search came to its end by itself, and not by the session's."""
        return self.stopped != BUDGET and self.trials > 0

    @property
    def candidate(self) -> Candidate | None:
        """The schedule to use: the best measured one, else the draft."""
        return self.best.candidate if self.best else self.draft


@dataclass(slots=True)
class TaskRun:
    """A task being tuned."""

    task: Task
    strategy: SearchStrategy
    progress: TaskProgress
    queued: list[Candidate]
    seeded: frozenset[Candidate]  # what was queued at the start; a strategy may propose it again
    best: MeasureResult | None = None
    draft: Candidate | None = None
    first_s: float = math.inf
    failed: int = 0
    winners: list[MeasureResult] = field(default_factory=list)  # the best of each batch
    unpacked: frozenset[str] = frozenset()  # sketches whose kernels read operands where they lie
    best_unpacked: MeasureResult | None = None  # of those sketches
    objective: Objective = LATENCY
    footprint: Callable[[Task, Candidate], Footprint] | None = None  # None: nobody asks for it
    good: list[MeasureResult] = field(default_factory=list)  # all that worked
    raced: Sequence[MeasureResult] = ()  # side by side
    _footprints: dict[Candidate, Footprint] = field(default_factory=dict)

    def chosen(self, results: Sequence[MeasureResult]) -> MeasureResult | None:
        """The fastest, or one as fast that has nothing packed: no copy, and none to check."""
        if (best := fastest(results)) is None:
            return None
        unpacked = fastest([r for r in results if r.candidate.sketch in self.unpacked])
        return unpacked if unpacked and unpacked.latency_s < best.latency_s * TIE else best

    def note(self, results: Sequence[MeasureResult]) -> None:
        """Take in what was measured, now or before."""
        self.good += [r for r in results if r.status is MeasureStatus.OK]
        known = [self.best_unpacked] if self.best_unpacked else []
        known += [r for r in results if r.candidate.sketch in self.unpacked]
        self.best_unpacked = fastest(known)

    def finalists(self) -> list[Candidate]:
        """The draft, what packs nothing, the winners of the fastest batches; none of one batch.

        Where other things than latency count, also those that cost least of what is about as fast,
        and the fastest of all, of one batch and of what was measured before.
        """
        chosen = [self.draft] if self.draft else []
        chosen += [self.best_unpacked.candidate] if self.best_unpacked else []
        winners = list(self.winners)
        if self.objective != LATENCY:
            winners += self._about_as_fast()[:FINALISTS]
            chosen = [*self._leanest(), *chosen]
        elif len(self.winners) < 2:
            return []
        best = sorted(winners, key=lambda r: r.latency_s)[: FINALISTS - 1]
        return list(dict.fromkeys([*chosen, *(r.candidate for r in best)]))[:FINALISTS]

    def preferred(self) -> list[Candidate]:
        """What the objective prefers to the fastest, of those that a race found as fast."""
        near = as_fast(self._costed(self.raced))
        return [f.candidate for f in self._cheaper(near)] if self.objective != LATENCY else []

    def note_again(self, results: Sequence[MeasureResult], winner: MeasureResult) -> None:
        """Take in a second race of some of those that were raced, and of the ``winner``.

        It says how much slower than the winner they are; the scale stays that of the first race.
        """
        again = result_of(results, winner.candidate)
        if again is None:
            return
        scale = winner.latency_s / again.latency_s
        later = {r.candidate: r for r in results if r.status is MeasureStatus.OK}
        del later[winner.candidate]
        self.raced = [
            r if (new := later.get(r.candidate)) is None
            else replace(
                r, run_secs=tuple(s * scale for s in new.run_secs), joules=r.joules or new.joules
            )
            for r in self.raced
        ]  # fmt: skip

    def _about_as_fast(self) -> list[MeasureResult]:
        """What may be as fast as the fastest, the fastest first."""
        ranked = sorted(self.good, key=lambda r: r.latency_s)
        limit = ABOUT * ranked[0].latency_s if ranked else 0.0
        return [r for r in ranked[:LOOKED_AT] if r.latency_s <= limit]

    def _leanest(self) -> list[Candidate]:
        """The fastest, and others about as fast, the cheapest first, that cost less than it."""
        known = [] if self.objective.metered else self._costed(self._about_as_fast())
        return [f.candidate for f in (*known[:1], *self._cheaper(known))]

    def _cheaper(self, known: Sequence[Finalist]) -> list[Finalist]:
        """Those that cost less than the fastest, the cheapest first, ``LEAN`` at most."""
        costs = {f: self.objective.cost(f, self.task.weight) for f in known}
        limit = costs[min(known, key=lambda f: f.latency_s)] if known else 0.0
        less = [f for f in known if costs[f] < limit]
        return sorted(less, key=lambda f: (costs[f], f.latency_s))[:LEAN]

    def _costed(self, results: Sequence[MeasureResult]) -> list[Finalist]:
        if self.footprint is None:
            return []
        known = self._footprints
        for candidate in (r.candidate for r in results):
            if candidate not in known:
                known[candidate] = self.footprint(self.task, candidate)
        return [Finalist(r.candidate, r.latency_s, known[r.candidate], r.joules) for r in results]

    def outcome(self) -> TaskOutcome:
        progress = self.progress
        return TaskOutcome(
            task=self.task,
            best=self.best,
            draft=self.draft,
            first_s=self.first_s,
            trials=progress.trials,
            failed=self.failed,
            stopped=progress.stopped or BUDGET,
            finalists=non_dominated(self._costed(self.raced or self._about_as_fast())),
        )


def fastest(results: Sequence[MeasureResult]) -> MeasureResult | None:
    good = [r for r in results if r.status is MeasureStatus.OK]
    return min(good, key=lambda r: r.latency_s, default=None)


def result_of(
    results: Sequence[MeasureResult], candidate: Candidate | None
) -> MeasureResult | None:
    """The result of a candidate, if it worked."""
    good = (r for r in results if r.status is MeasureStatus.OK and r.candidate == candidate)
    return next(good, None)
