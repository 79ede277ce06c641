"""Felix's kind of search: gradient descent on relaxed decisions, from several seeds.

Felix (ASPLOS 2024) makes a schedule's integers real numbers, writes its features as differentiable
formulas of them, and descends the predicted latency by Adam with a penalty for what constraints
forbid. It then rounds all points on the way and measures those that are predicted to be fastest.

Our symbols are no differentiable formulas: they round up, take maxima and look up tables. **So
nothing is differentiated through them.** They are evaluated at points of the sketch alone. Between
those the latency is interpolated linearly over simplices of neighbouring options (``slopes``), and
the gradient is that of the interpolation, which is exact: differences between neighbours. It has
steps where Felix's formulas were smoothed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.search.ranked import RankedSearch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.tuner.cost_model.base import Array, CostModel
    from torch_pruner.tuner.search.space import Rows

RATE = 0.05  # of a decision's options, for each step; a tenth of it in the second half
MEAN, SQUARE = 0.9, 0.999  # what Adam's averages keep
PENALTY = 2.0  # of an invalid point, in logarithm of latency above its worst valid neighbour


class FelixSearch(RankedSearch):
    """``cost_model`` is what is descended: its score is taken for minus a logarithm of latency.

    With the residual model that is the symbolic latency with the term that is fitted to what was
    measured; with the analytic one the symbolic latency alone. Each batch starts from ``seeds``
    random points of each sketch. Every decision counts as ordered, switches too.
    """

    def __init__(self, cost_model: CostModel, *, seeds: int = 16, steps: int = 40) -> None:
        super().__init__(cost_model, eps_greedy=0.0)
        self.seeds, self.steps = seeds, steps

    def find(self) -> list[Rows]:
        """The rounded points of all descents."""
        return [self._descents(i) for i in range(len(self.spaces))]

    def _descents(self, i: int) -> Rows:
        space = self.spaces[i]
        starts = space.random(self.seeds * 8, self._rng)[: self.seeds]
        if not len(starts) or not len(space.sizes):
            return starts
        at, scale = starts.astype(np.float64), RATE * (space.sizes - 1.0)
        mean, square = np.zeros_like(at), np.zeros_like(at)
        met = [starts]
        for step in range(1, self.steps + 1):
            pull = slopes(lambda rows: self._cost(i, rows), at, space.sizes)
            mean += (1.0 - MEAN) * (pull - mean)
            square += (1.0 - SQUARE) * (pull**2 - square)
            move = mean / (1.0 - MEAN**step) / (np.sqrt(square / (1.0 - SQUARE**step)) + 1e-8)
            rate = scale if 2 * step <= self.steps else 0.1 * scale
            at = np.clip(at - rate * move, 0.0, space.sizes - 1.0)
            met.append(np.rint(at).astype(np.int64))
        return space.unique(np.concatenate(met))

    def _cost(self, i: int, rows: Rows) -> Array:
        """Minus the score; nan for what is no valid point."""
        space = self.spaces[i]
        valid = np.asarray(space.sketch.valid(space.decisions(rows)), dtype=bool)
        cost = np.full(len(rows), np.nan)
        cost[valid] = -self.score(i, rows[valid])
        return cost


def slopes(cost: Callable[[Rows], Array], at: Array, sizes: Rows) -> Array:
    """The gradient (n, d) at ``at`` (n, d) of an interpolation of ``cost`` over option indices.

    ``at`` lies between 0 and ``sizes - 1``. Of the cell around each point the d + 1 corners of one
    simplex are evaluated: from the lowest corner on, decisions go up by one option in the order of
    how far they are up already. Over that simplex the interpolation is linear, and its slope along
    a decision is what its step adds to the cost. A corner whose cost is nan costs ``PENALTY`` more
    than the worst of the others; where all are nan there is no slope.
    """
    n, d = at.shape
    low = np.clip(np.floor(at), 0, np.maximum(sizes - 2, 0)).astype(np.int64)
    order = np.argsort(low - at, axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    corners = low[:, None, :] + (rank[:, None, :] < np.arange(d + 1)[None, :, None])
    corners = np.minimum(corners, sizes - 1)
    costs = cost(corners.reshape(-1, d)).reshape(n, d + 1)
    known = np.where(np.isnan(costs), -np.inf, costs).max(axis=1, keepdims=True)
    worst = np.where(np.isfinite(known), known + PENALTY, 0.0)
    costs = np.where(np.isnan(costs), worst, costs)
    result = np.empty((n, d))
    np.put_along_axis(result, order, np.diff(costs, axis=1), axis=1)
    return result
