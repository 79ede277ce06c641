"""One task of a tuning session: what is known of it, and which of its schedules are best.

In: results as they come. Out: the task's outcome. Measures nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.task import Candidate, MeasureResult, MeasureStatus, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.tuner.scheduler import TaskProgress
    from torch_pruner.tuner.search.base import SearchStrategy

FINALISTS = 8
TIE = 1.03  # times the winner: the draft, which knows of the kernels around, is as good
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

    def chosen(self, results: Sequence[MeasureResult]) -> MeasureResult | None:
        """The fastest, or one as fast that has nothing packed: no copy, and none to check."""
        if (best := fastest(results)) is None:
            return None
        unpacked = fastest([r for r in results if r.candidate.sketch in self.unpacked])
        return unpacked if unpacked and unpacked.latency_s < best.latency_s * TIE else best

    def note_unpacked(self, results: Sequence[MeasureResult]) -> None:
        known = [self.best_unpacked] if self.best_unpacked else []
        known += [r for r in results if r.candidate.sketch in self.unpacked]
        self.best_unpacked = fastest(known)

    def finalists(self) -> list[Candidate]:
        """The draft, what packs nothing, the winners of the fastest batches; none of one batch."""
        if len(self.winners) < 2:
            return []
        best = sorted(self.winners, key=lambda r: r.latency_s)[: FINALISTS - 1]
        chosen = [self.draft] if self.draft else []
        chosen += [self.best_unpacked.candidate] if self.best_unpacked else []
        return list(dict.fromkeys([*chosen, *(r.candidate for r in best)]))[:FINALISTS]

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
