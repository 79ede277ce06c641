"""Gradient-boosted trees on decisions and symbols, trained online. Needs the extra ``xgboost``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_pruner.exc import OptionError
from torch_pruner.task import MeasureResult, MeasureStatus, Task
from torch_pruner.tuner.cost_model.analytic import log_latency
from torch_pruner.tuner.cost_model.base import Array, CostModel, Decisions
from torch_pruner.tuner.cost_model.features import decision_features, decisions_of, symbol_features

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Sketch

MIN_SAMPLES = 4
FAILED = 3.0  # log latency of a candidate that failed, above the worst that did not
PARAMETERS = {"max_depth": 6, "eta": 0.2, "min_child_weight": 1, "verbosity": 0, "nthread": 1}
ROUNDS = 60


@dataclass(slots=True)
class _Samples:
    x: list[Array] = field(default_factory=list)
    y: list[float] = field(default_factory=list)  # nan: failed
    trees: Any = None


def xgboost_for(model: str) -> Any:
    """The module; ``OptionError`` where it is not installed, which names the cost model."""
    try:
        import xgboost  # the optional extra
    except ImportError as err:
        problem = f"{model!r} needs xgboost; run: pip install 'torch_pruner[xgboost]'"
        raise OptionError("cost_model", problem) from err
    return xgboost


class XGBoostModel(CostModel):
    """One ensemble per task and sketch; the analytic score until there are a few samples."""

    def __init__(self, seed: int = 0) -> None:
        self._xgboost: Any = xgboost_for("xgb")
        self._seed = seed
        self._samples: dict[tuple[str, str], _Samples] = {}

    def predict(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array:
        own = self._samples.get((task.workload, sketch.name))
        if own is None or own.trees is None or not len(decisions):
            return -log_latency(sketch, decisions)
        matrix = self._xgboost.DMatrix(_features(sketch, decisions))
        return -np.asarray(own.trees.predict(matrix), dtype=np.float64)

    def update(
        self, task: Task, sketches: Sequence[Sketch], results: Sequence[MeasureResult]
    ) -> None:
        for sketch in sketches:
            found = [r for r in results if r.candidate.sketch == sketch.name]
            if not found:
                continue
            own = self._samples.setdefault((task.workload, sketch.name), _Samples())
            own.x.extend(_features(sketch, decisions_of(sketch, (r.candidate for r in found))))
            ok = MeasureStatus.OK
            own.y.extend(np.log(r.latency_s) if r.status is ok else np.nan for r in found)
            self._train(own)

    def _train(self, own: _Samples) -> None:
        y = np.array(own.y)
        known = y[~np.isnan(y)]
        if len(known) < MIN_SAMPLES:
            return
        y = np.where(np.isnan(y), known.max() + FAILED, y)
        matrix = self._xgboost.DMatrix(np.stack(own.x), label=y)
        parameters = {**PARAMETERS, "seed": self._seed, "base_score": float(known.mean())}
        own.trees = self._xgboost.train(parameters, matrix, num_boost_round=ROUNDS)


def _features(sketch: Sketch, decisions: Decisions) -> Array:
    return np.concatenate(
        [decision_features(decisions), symbol_features(sketch, decisions)], axis=1
    )
