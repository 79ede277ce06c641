"""Which task gets the next batch: first each once, then where it is expected to gain most.

A value of its own: it sees numbers only, and the session tells it what every batch brought.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

RECENT = 3  # batches over which the gain of a task is averaged
ALPHA = 0.5  # weight of what recent batches gained against what is left to gain


@dataclass(slots=True)
class TaskProgress:
    """How far the tuning of one task has come. Latencies are seconds per call of the kernel."""

    weight: int
    predicted_s: float  # by the draft model, before anything is measured
    bound_s: float = 0.0  # no schedule can be faster; 0 where that is not known
    max_trials: int | None = None
    trials: int = 0
    batches: int = 0
    best_s: float = math.inf
    stale: int = 0  # batches since the last improvement
    gains: list[float] = field(default_factory=list)  # seconds per call, one per batch
    stopped: str = ""  # why it gets no more trials

    @property
    def latency_s(self) -> float:
        return self.best_s if math.isfinite(self.best_s) else self.predicted_s

    @property
    def expected_gain_s(self) -> float:
        """Seconds per run of the graph that the next batch may save."""
        recent = self.gains[-RECENT:]
        learned = sum(recent) / len(recent) if recent else 0.0
        left = min(self.latency_s / (self.batches + 1), max(0.0, self.latency_s - self.bound_s))
        return self.weight * (ALPHA * learned + (1 - ALPHA) * left / (1 + self.stale))


@dataclass(slots=True)
class GradientScheduler:
    """Picks a task per batch and retires tasks that have no more to gain.

    A task retires when its trials are used up, its space is exhausted, its best is within ``near``
    of the bound, or ``patience`` batches (and ``patience_trials`` trials) went by without a gain.
    """

    tasks: Sequence[TaskProgress]
    near: float = 0.05
    patience: int = 4
    patience_trials: int = 24

    def next(self) -> int | None:
        """The task that gets the next batch; None when all have retired."""
        open_ = [i for i, t in enumerate(self.tasks) if not t.stopped]
        if not open_:
            return None
        untouched = [i for i in open_ if not self.tasks[i].batches]
        if untouched:
            return max(untouched, key=lambda i: self.tasks[i].weight * self.tasks[i].latency_s)
        return max(open_, key=lambda i: self.tasks[i].expected_gain_s)

    def report(self, i: int, n_trials: int, best_s: float, *, margin: float = 0.01) -> None:
        """What the batch just given to task ``i`` brought: its size and the best latency in it."""
        task = self.tasks[i]
        old = task.best_s
        task.trials += n_trials
        task.batches += 1
        task.best_s = min(old, best_s)
        gain = old - task.best_s if math.isfinite(old) else 0.0
        task.gains.append(gain)
        improved = math.isfinite(task.best_s) and task.best_s < old * (1 - margin)
        task.stale = 0 if improved else task.stale + 1
        self._retire(task)

    def exhausted(self, i: int) -> None:
        self.tasks[i].stopped = "space exhausted"

    def _retire(self, task: TaskProgress) -> None:
        patient = task.stale >= self.patience and task.trials >= self.patience_trials
        if task.max_trials is not None and task.trials >= task.max_trials:
            task.stopped = "trials used up"
        elif task.best_s <= task.bound_s * (1 + self.near):
            task.stopped = "at the bound"
        elif patient:
            task.stopped = "no improvement"
