"""AdaTune's kind of search: what is left to chance is what the model does not know.

AdaTune (NeurIPS 2020) looks for points of large expected improvement by simulated annealing, and
draws a share of each batch at random, which is 5 % in AutoTVM and here follows the disagreement of
the model's trees. Its other half, repeats of a measurement that end early, is the executor's
business (``early_out``) and the same for every strategy here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.search.ranked import RankedSearch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.task import MeasureResult
    from torch_pruner.tuner.cost_model.base import Array
    from torch_pruner.tuner.cost_model.forest import ForestModel
    from torch_pruner.tuner.search.space import Rows

FIRST_SHARE = 0.05  # as long as there is no forest
ASKED = 20  # random points of each sketch that say how much the trees disagree


class AdatuneSearch(RankedSearch):
    """``chains`` of ``steps`` of annealing, shared out among the sketches, begin at random points.

    ``eps_greedy`` is the mean deviation of the forest's trees over random points, in units of the
    best throughput, and is renewed with every batch that is observed.
    """

    def __init__(self, cost_model: ForestModel, *, chains: int = 64, steps: int = 60) -> None:
        super().__init__(cost_model, FIRST_SHARE)
        self.forest, self.chains, self.steps = cost_model, chains, steps

    def find(self) -> list[Rows]:
        """Every valid point that a chain was at or looked at."""
        return [self._annealed(i) for i in range(len(self.spaces))]

    def observe(self, results: Sequence[MeasureResult]) -> None:
        super().observe(results)
        deviations = [
            self.forest.deviation(self._task, space.sketch, space.decisions(rows))
            for space in self.spaces
            if len(rows := space.random(8 * ASKED, self._rng)[:ASKED])
        ]
        known = [d for d in deviations if d is not None]
        self.eps_greedy = float(np.concatenate(known).mean()) if known else FIRST_SHARE

    def _annealed(self, i: int) -> Rows:
        space, rng = self.spaces[i], self._rng
        chains = max(1, self.chains // len(self.spaces))
        rows = space.random(8 * chains, rng)[:chains]
        if not len(rows):
            return rows
        scores, met = self.score(i, rows), [rows]
        unit = max(float(scores.std()), 1e-12)
        for step in range(self.steps):
            moved = space.mutate(rows, rng)
            valid = np.asarray(space.sketch.valid(space.decisions(moved)), dtype=bool)
            moved = np.where(valid[:, None], moved, rows)
            new = self.score(i, moved)
            temperature = unit * (1.0 - step / self.steps)
            better = accepted(new - scores, temperature, rng)
            rows, scores = np.where(better[:, None], moved, rows), np.where(better, new, scores)
            met.append(moved)
        return space.unique(np.concatenate(met))


def accepted(gain: Array, temperature: float, rng: np.random.Generator) -> Array:
    """Which moves of simulated annealing are made: all that gain, others by chance."""
    return np.asarray(rng.random(len(gain)) < np.exp(np.minimum(gain / temperature, 0.0)))
