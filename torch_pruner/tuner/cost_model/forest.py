"""AdaTune's kind of model: a random forest, whose trees disagree where it does not know.

AdaTune (NeurIPS 2020) fits ten trees to the throughput of what was measured of a task, and scores
a point by the improvement over the best that is to be expected, given the mean of the trees and
their deviation. The features are the statement features without the draft model's estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.cost_model.base import Array, CostModel, Decisions
from torch_pruner.tuner.cost_model.features import decisions_of, seconds_of
from torch_pruner.tuner.cost_model.measured import Measured
from torch_pruner.tuner.cost_model.pattern import undrafted_features

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import MeasureResult, Task

TREES, TRIED = 10, 10  # features tried at each split, as in AdaTune
MIN_WORKED = 4  # of a task, before it has a forest
_MEAN = 1e-6  # of a score, so that points of which no improvement is to be expected have an order


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes in arrays; the two below a split are next to each other.

    A leaf's ``below`` is 0, which is below nothing.
    """

    feature: Decisions  # (nodes,)
    threshold: Array
    below: Decisions  # the node for values up to the threshold; the other one follows it
    value: Array

    def predict(self, x: Array) -> Array:
        """(n,) means of the leaves that the rows of ``x`` (n, f) fall into."""
        node, rows = np.zeros(len(x), dtype=np.int64), np.arange(len(x))
        while len(rows := rows[self.below[node[rows]] > 0]):
            at = node[rows]
            node[rows] = self.below[at] + (x[rows, self.feature[at]] > self.threshold[at])
        return self.value[node]


def grow(x: Array, y: Array, rng: np.random.Generator) -> Tree:
    """A regression tree of rows (n, f), n > 0, until what a leaf holds is equal."""
    feature, threshold, below, value = [0], [0.0], [0], [float(y.mean())]
    left = [(0, np.arange(len(x)))]
    while left:
        node, rows = left.pop()
        split = _split(x[rows], y[rows], rng)
        if split is None:
            continue
        feature[node], threshold[node], below[node] = *split, len(value)
        up = x[rows, split[0]] > split[1]
        for part in (rows[~up], rows[up]):
            left.append((len(value), part))
            value.append(float(y[part].mean()))
            feature.append(0)
            threshold.append(0.0)
            below.append(0)
    return Tree(np.array(feature), np.array(threshold), np.array(below), np.array(value))


def _split(x: Array, y: Array, rng: np.random.Generator) -> tuple[int, float] | None:
    """The best threshold of some features that differ, by squared error; None: nothing to gain."""
    differ = np.flatnonzero(x.max(axis=0) > x.min(axis=0))
    if not len(differ) or y.max() == y.min():
        return None
    tried = rng.permutation(differ)[:TRIED]
    order = np.argsort(x[:, tried], axis=0, kind="stable")
    values = np.take_along_axis(x[:, tried], order, axis=0)
    sums = np.cumsum(y[order], axis=0)
    n = np.arange(1, len(y))[:, None]
    gain = sums[:-1] ** 2 / n + (sums[-1] - sums[:-1]) ** 2 / (len(y) - n)
    # Of neighbours the mean may round to the larger one, and then it would divide nothing.
    middle = 0.5 * (values[1:] + values[:-1])
    gain[(middle >= values[1:]) | (values[1:] == values[:-1])] = -np.inf
    at, which = np.unravel_index(int(np.argmax(gain)), gain.shape)
    if not np.isfinite(gain[at, which]):
        return None
    return int(tried[which]), float(middle[at, which])


class ForestModel(CostModel):
    """Expected improvement in throughput, in units of the task's best; 0 until it has a forest."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng([seed, 0xADA])
        self._tasks: dict[str, Measured] = {}
        self._forests: dict[str, list[Tree]] = {}

    def predict(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array:
        found = self._of_trees(task, sketch, decisions)
        if found is None:
            return np.zeros(len(decisions))
        mean, deviation = found.mean(axis=0), found.std(axis=0)
        return np.asarray(expected_improvement(mean, deviation) + _MEAN * mean)

    def deviation(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array | None:
        """(n,): how much the trees disagree, in units of the task's best throughput.

        None as long as there is no forest.
        """
        found = self._of_trees(task, sketch, decisions)
        return None if found is None else found.std(axis=0)

    def update(
        self, task: Task, sketches: Sequence[Sketch], results: Sequence[MeasureResult]
    ) -> None:
        known = self._tasks.setdefault(task.workload, Measured())
        for sketch in sketches:
            own = [r for r in results if r.candidate.sketch == sketch.name]
            if own:
                decisions = decisions_of(sketch, (r.candidate for r in own))
                known.add(undrafted_features(task, sketch, decisions), seconds_of(own))
        if known.worked >= MIN_WORKED:
            assert known.features is not None
            x, y = known.features, known.throughput()
            draws = self._rng.integers(0, len(y), (TREES, len(y)))
            self._forests[task.workload] = [grow(x[d], y[d], self._rng) for d in draws]

    def _of_trees(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array | None:
        """(TREES, n) throughput, by each tree."""
        forest = self._forests.get(task.workload)
        if forest is None or not len(decisions):
            return None
        x = undrafted_features(task, sketch, decisions)
        return np.stack([tree.predict(x) for tree in forest])


def expected_improvement(mean: Array, deviation: Array) -> Array:
    """Over 1, of normal distributions: (m - 1) F(z) + s f(z) with z = (m - 1) / s."""
    gain = mean - 1.0
    s = np.maximum(deviation, 1e-12)
    z = gain / s
    below = np.array([0.5 * math.erfc(-v / math.sqrt(2.0)) for v in z])
    density = np.exp(-0.5 * np.minimum(z**2, 1e3)) / math.sqrt(2.0 * math.pi)
    return np.asarray(gain * below + s * density)
