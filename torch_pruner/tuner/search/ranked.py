"""What searches of one model have in common: they find points, rank them and propose the best.

A search says how it finds points (``find``) and what share of its proposals is left to chance. The
points that it finds need not be new; where too few are, chance fills up the batch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.task import MeasureStatus
from torch_pruner.tuner.search.base import SearchStrategy
from torch_pruner.tuner.search.share import Share
from torch_pruner.tuner.search.unproposed import Unproposed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import Candidate, MeasureResult, Task
    from torch_pruner.tuner.cost_model.base import Array, CostModel
    from torch_pruner.tuner.search.space import Rows, SketchSpace


class RankedSearch(SearchStrategy):
    """``cost_model`` ranks what ``find`` gives, and learns from what is observed.

    Points are found anew for each batch. ``eps_greedy`` is the share of a batch that is drawn at
    random.
    """

    def __init__(self, cost_model: CostModel, eps_greedy: float) -> None:
        self.cost_model, self.eps_greedy = cost_model, eps_greedy

    def start(
        self,
        task: Task,
        sketches: Sequence[Sketch],
        *,
        rng: np.random.Generator,
        history: Sequence[MeasureResult] = (),
    ) -> None:
        self._task, self._rng = task, rng
        self._left = Unproposed(sketches, (r.candidate for r in history))
        self._results: list[MeasureResult] = []
        self._found: list[Rows] | None = None
        self._chance = Share()
        if history:
            self.observe(history)

    @abstractmethod
    def find(self) -> list[Rows]:
        """For each sketch the points that are worth a look, in any order and any number."""

    def draft(self) -> None:
        if self._found is None:
            self._found = self.find()

    def propose(self, n: int) -> list[Candidate]:
        self.draft()
        assert self._found is not None
        fresh = [self._left.fresh(i, rows) for i, rows in enumerate(self._found)]
        self._found = None
        where = [(i, j) for i, rows in enumerate(fresh) for j in range(len(rows))]
        scores = np.concatenate([*self.scores(fresh), np.zeros(0)])
        mixed = self._rng.permutation(len(where))  # equals in no order: at first all of them are
        order = mixed[np.argsort(-scores[mixed], kind="stable")]
        proposals: list[Candidate] = []
        for k in order[: n - self._chance.of(self.eps_greedy, n)]:
            i, j = where[k]
            proposals += self._left.take(i, fresh[i][j : j + 1])
        for i, rows in enumerate(self._left.random(n - len(proposals), self._rng)):
            proposals += self._left.take(i, rows)
        return proposals

    def observe(self, results: Sequence[MeasureResult]) -> None:
        self._results.extend(results)
        self.cost_model.update(self._task, [s.sketch for s in self.spaces], results)
        self._found = None

    @property
    def spaces(self) -> Sequence[SketchSpace]:
        return self._left.spaces

    def score(self, i: int, rows: Rows) -> Array:
        """What the cost model says of valid rows of sketch ``i``."""
        space = self.spaces[i]
        return self.cost_model.predict(self._task, space.sketch, space.decisions(rows))

    def scores(self, rows: Sequence[Rows]) -> list[Array]:
        """The same for each sketch."""
        return [self.score(i, own) for i, own in enumerate(rows)]

    def winners(self, n: int) -> list[Rows]:
        """The ``n`` best measured points, each with its sketch's."""
        good = [r for r in self._results if r.status is MeasureStatus.OK]
        good = sorted(good, key=lambda r: r.latency_s)[:n]
        return [space.rows_of_candidates(r.candidate for r in good) for space in self.spaces]
