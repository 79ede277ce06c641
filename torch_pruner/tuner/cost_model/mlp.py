"""TenSet's kind of model, trained online from nothing: a baseline of the pattern-aware one.

Three layers on statement features, ranked within a task (TenSet, NeurIPS 2021, trains such a model
with a rank loss). It sees no data flow and has no regression of the task's own. The draft model is
one of its features and nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.cost_model.base import Array, CostModel, Decisions
from torch_pruner.tuner.cost_model.features import decisions_of, seconds_of
from torch_pruner.tuner.cost_model.layers import Numbers, outer, product, whole_blocks
from torch_pruner.tuner.cost_model.pattern import STATEMENT, patterns
from torch_pruner.tuner.cost_model.ranking import lambda_rank
from torch_pruner.tuner.cost_model.training import Adam, Scaling, TaskList, sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import MeasureResult, Task

WIDTH = 256
SHAPES = ((STATEMENT, WIDTH), (WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH, 1), (1,))
RATE = 7e-4
MIN_LIST, STEPS, LISTS = 4, 8, 4


class TensetMLP(CostModel):
    """Scores of the network; those of random parameters until a task has a few measurements."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng([seed, 0x7E45])
        sizes = [int(np.prod(s)) for s in SHAPES]
        self._flat = np.zeros(sum(sizes), np.float32)
        ends = np.cumsum(sizes)[:-1]
        views = zip(np.split(self._flat, ends), SHAPES, strict=True)
        self._layers = [view.reshape(shape) for view, shape in views]
        for weight in self._layers[::2]:
            weight[...] = self._rng.standard_normal(weight.shape) * weight.shape[0] ** -0.5
        self._optimiser = Adam(RATE, decay=1e-6, clip=0.5, size=len(self._flat))
        self._lists: dict[str, TaskList] = {}
        self._scaling: Scaling | None = None

    def predict(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array:
        n = len(decisions)
        if not n:
            return np.zeros(0)
        found = patterns(task, sketch, decisions)
        if self._scaling is None:
            features = np.zeros((n, STATEMENT), np.float32)
        else:
            features = self._scaling.batch(found).statement
        return self._forward(features[whole_blocks(n)])[-1][:n, 0].astype(np.float64)

    def update(
        self, task: Task, sketches: Sequence[Sketch], results: Sequence[MeasureResult]
    ) -> None:
        for sketch in sketches:
            own = [r for r in results if r.candidate.sketch == sketch.name]
            if own:
                decisions = decisions_of(sketch, (r.candidate for r in own))
                known = self._lists.setdefault(task.workload, TaskList())
                known.add(patterns(task, sketch, decisions), seconds_of(own))
        lists = [t for t in self._lists.values() if t.measured >= MIN_LIST]
        if not lists:
            return
        if self._scaling is None:
            self._scaling = Scaling.fit(lists)
        for _ in range(STEPS):
            some = self._rng.permutation(len(lists))[:LISTS]
            self._step([lists[i] for i in some], self._scaling)

    def _forward(self, x: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Both hidden layers and the scores (n, 1) of rows that are whole blocks."""
        w1, b1, w2, b2, w3, b3 = self._layers
        first = np.maximum(product(x, w1) + b1, 0.0)
        second = np.maximum(product(first, w2) + b2, 0.0)
        return first, second, product(second, w3) + b3

    def _step(self, lists: Sequence[TaskList], scaling: Scaling) -> None:
        batch, prior, labels, mask = sample(lists, scaling, self._rng)
        first, second, score = self._forward(batch.statement)
        _, pull = lambda_rank(score.reshape(prior.shape).astype(np.float64), labels, mask)
        _, _, w2, _, w3, _ = self._layers
        last = pull.reshape(-1, 1).astype(np.float32)
        middle = (last @ w3.T) * (second > 0)
        begin = product(middle, w2.T) * (first > 0)
        gradients: list[Numbers] = []
        for x, dy in ((batch.statement, begin), (first, middle), (second, last)):
            gradients += [outer(x, dy), dy.sum(axis=0)]
        self._optimiser.step(self._flat, np.concatenate([g.ravel() for g in gradients]))
