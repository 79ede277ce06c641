"""The search seam: a strategy is asked for candidates and told what became of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import Candidate, MeasureResult, Task


class SearchStrategy(ABC):
    """Chooses which candidates of one task to measure.

    Contract: pure with respect to the outside world (no clock, disk or device); every random choice
    comes from the ``rng`` of ``start``. ``propose`` returns at most ``n`` candidates, never one
    that it has proposed before or that is in the history; ``[]`` means that the space is exhausted.
    Results may be observed in any grouping, and some proposals may never be observed.

    Example:
        strategy.start(task, sketches_for(task), rng=np.random.default_rng(0))
        while candidates := strategy.propose(8):
            strategy.observe(executor.measure([MeasureInput(task, c) for c in candidates]))
    """

    @abstractmethod
    def start(
        self,
        task: Task,
        sketches: Sequence[Sketch],
        *,
        rng: np.random.Generator,
        history: Sequence[MeasureResult] = (),
    ) -> None:
        """Begin with a task. ``history`` holds what is known of it from before."""

    def learn_from(self, others: Sequence[Candidate]) -> None:
        """Schedules that are the best of similar tasks now, the most similar first: worth a look.

        Default: they are not looked at.
        """

    def draft(self) -> None:
        """Refresh what ``propose`` chooses from. A call of its own, so that it can be timed."""

    @abstractmethod
    def propose(self, n: int) -> list[Candidate]: ...

    @abstractmethod
    def observe(self, results: Sequence[MeasureResult]) -> None: ...
