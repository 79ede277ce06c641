"""One scale for all times of a task: what its anchor takes longer, the others take longer, too."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.task import MeasureStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.task import Candidate, MeasureResult

PACE = 1.5  # times slower: more is no pace of the processor's but a core that somebody else took
HAND_OVER = 3.0  # an anchor this many times slower than the best one known costs too much


@dataclass(frozen=True, slots=True)
class Anchor:
    """A candidate that is timed with every group of its task; ``job`` is its number, below 0."""

    job: int
    candidate: Candidate
    seconds: float


class Anchors:
    """The anchors of all tasks, by name, the same for every worker and device.

    A shared processor changes its pace by a third for seconds at a time. An anchor is the best of
    the first batch and stays: one that followed the best so far would hand on that one's luck, and
    such errors pile up in the direction that wins. Only one that is far too slow is replaced.
    """

    def __init__(self) -> None:
        self._anchors: dict[str, Anchor | None] = {}
        self._count = 0

    def of(self, name: str) -> Anchor | None:
        return self._anchors.get(name)

    def choose(self, name: str, results: Sequence[MeasureResult]) -> None:
        """Take one of ``results`` of the task where it has none, or one that is far too slow."""
        good = [r for r in results if r.status is MeasureStatus.OK]
        best = min(good, key=lambda r: r.latency_s, default=None)
        if best is None or (name in self._anchors and not self._too_slow(name, best)):
            return
        self._count += 1
        self._anchors[name] = Anchor(-self._count, best.candidate, best.latency_s)

    def _too_slow(self, name: str, best: MeasureResult) -> bool:
        anchor = self._anchors[name]
        return anchor is not None and anchor.seconds > HAND_OVER * best.latency_s

    def give_up(self, job: int) -> None:
        """An anchor that a worker died with: its task goes without."""
        for name, anchor in self._anchors.items():
            if anchor is not None and anchor.job == job:
                self._anchors[name] = None

    def slower(self, job: int, run_secs: Sequence[float]) -> float:
        """How many times slower the machine is than when the anchor ``job`` was chosen.

        Above ``PACE`` it says nothing about others: where a core is gone, a kernel of one thread
        takes as long as ever.
        """
        anchor = next((a for a in self._anchors.values() if a is not None and a.job == job), None)
        return statistics.median(run_secs) / anchor.seconds if anchor and run_secs else 1.0
