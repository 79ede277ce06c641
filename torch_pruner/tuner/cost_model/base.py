"""The cost model seam: points of a sketch in, scores out, learning from what was measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import MeasureResult, Task

Array = np.ndarray[Any, np.dtype[np.float64]]
Decisions = np.ndarray[Any, np.dtype[np.int64]]


class CostModel(ABC):
    """Ranks the candidates of a task; used both to draft and to verify.

    Contract: scores are finite, higher is better, and comparable between all sketches of one task
    (not between tasks). A candidate's score does not depend on what else is in the batch, and is
    the same every time until the next ``update``. One model may serve many tasks.

    Example:
        scores = model.predict(task, sketch, decisions)
        best = decisions[np.argsort(-scores)[:8]]
    """

    @abstractmethod
    def predict(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array:
        """Scores (n,) of the points ``decisions`` (n, d) of ``sketch``."""

    def update(
        self, task: Task, sketches: Sequence[Sketch], results: Sequence[MeasureResult]
    ) -> None:
        """Learn from results, none of which was given before. Default: learn nothing."""
