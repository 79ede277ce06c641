"""Ansor's kind of model: boosted trees on statement features. Needs the extra ``xgboost``.

Ansor (OSDI 2020) predicts each program's throughput over the best of its task, errors weighted by
that throughput, and trains anew on everything that was measured of all tasks. It adds up a
prediction for each innermost statement; a kernel of ours has one that counts, and its features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_pruner.tuner.cost_model.base import Array, CostModel, Decisions
from torch_pruner.tuner.cost_model.features import decisions_of, seconds_of
from torch_pruner.tuner.cost_model.measured import Measured
from torch_pruner.tuner.cost_model.pattern import undrafted_features
from torch_pruner.tuner.cost_model.xgb_model import xgboost_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import MeasureResult, Task

MIN_WORKED = 8  # in all, before anything is trained; TVM waits for 100, most of a budget of ours
# TVM's, but for the rounds: it stops when the error on what was measured no longer falls.
PARAMETERS = {
    "max_depth": 10, "gamma": 0.001, "min_child_weight": 0, "eta": 0.2, "verbosity": 0,
    "nthread": 1,
}  # fmt: skip
ROUNDS = 100


class StatementTrees(CostModel):
    """Predicted throughput in units of the task's best; 0 for everything until it is trained.

    Raises ``OptionError`` where xgboost is not installed.
    """

    def __init__(self, seed: int = 0) -> None:
        self._xgboost: Any = xgboost_for("trees")
        self._seed = seed
        self._tasks: dict[str, Measured] = {}
        self._trees: Any = None

    def predict(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array:
        if self._trees is None or not len(decisions):
            return np.zeros(len(decisions))
        matrix = self._xgboost.DMatrix(undrafted_features(task, sketch, decisions))
        return np.asarray(self._trees.predict(matrix), dtype=np.float64)

    def update(
        self, task: Task, sketches: Sequence[Sketch], results: Sequence[MeasureResult]
    ) -> None:
        for sketch in sketches:
            own = [r for r in results if r.candidate.sketch == sketch.name]
            if own:
                decisions = decisions_of(sketch, (r.candidate for r in own))
                features = undrafted_features(task, sketch, decisions)
                known = self._tasks.setdefault(task.workload, Measured())
                known.add(features, seconds_of(own))
        if sum(m.worked for m in self._tasks.values()) >= MIN_WORKED:
            self._train()

    def _train(self) -> None:
        tasks = list(self._tasks.values())
        x = np.concatenate([m.features for m in tasks if m.features is not None])
        y = np.concatenate([m.throughput() for m in tasks])
        matrix = self._xgboost.DMatrix(x, label=y, weight=np.maximum(y, 1e-6))
        parameters = {**PARAMETERS, "seed": self._seed, "base_score": float(y.mean())}
        self._trees = self._xgboost.train(parameters, matrix, num_boost_round=ROUNDS)
