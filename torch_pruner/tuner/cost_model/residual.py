"""The analytic model with its errors learned as they are measured: regression on residuals.

Per task and sketch, the residual ``log(measured) - log(predicted)`` is a Gaussian process over the
decisions: near a measured point the prediction follows the measurement, far from any it falls back
to the analytic model times the task's mean error. Fitting is one small Cholesky factorisation, so
it runs after every batch. This is an online verifier for want of a learned one, not PaCM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.task import MeasureResult, MeasureStatus, Task
from torch_pruner.tuner.cost_model.analytic import log_latency
from torch_pruner.tuner.cost_model.base import Array, CostModel, Decisions
from torch_pruner.tuner.cost_model.features import decision_features, decisions_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.tuner.sketch.base import Sketch

LENGTHS = (0.15, 0.3, 0.6, 1.2)  # of the kernel, per square root of the number of decisions
NOISE = 0.05  # standard deviation of a measured log latency
FAILED = 1.5  # residual of a candidate that failed, above the worst that did not
MAX_POINTS = 400


@dataclass(slots=True)
class _Fit:
    """What was measured of one sketch of one task, and the regression on it."""

    low: Array
    scale: Array
    points: list[Array] = field(default_factory=list)
    residuals: list[float] = field(default_factory=list)  # nan: failed
    x: Array = field(default_factory=lambda: np.zeros((0, 0)))
    weights: Array = field(default_factory=lambda: np.zeros(0))
    length: float = 1.0

    def scaled(self, decisions: Decisions) -> Array:
        return (decision_features(decisions) - self.low) / self.scale


class ResidualModel(CostModel):
    """Minus the logarithm of the corrected latency."""

    def __init__(self) -> None:
        self._fits: dict[tuple[str, str], _Fit] = {}
        self._means: dict[tuple[str, str], float] = {}

    def predict(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array:
        score = -log_latency(sketch, decisions)
        workload = task.workload
        mean = self._means.get((workload, sketch.name), self._means.get((workload, ""), 0.0))
        fit = self._fits.get((workload, sketch.name))
        if fit is None or not len(fit.x):
            return score - mean
        return score - mean - _kernel(fit.scaled(decisions), fit.x, fit.length) @ fit.weights

    def update(
        self, task: Task, sketches: Sequence[Sketch], results: Sequence[MeasureResult]
    ) -> None:
        workload = task.workload
        for sketch in sketches:
            own = [r for r in results if r.candidate.sketch == sketch.name]
            if own:
                fit = self._fits.setdefault((workload, sketch.name), _empty(sketch))
                _append(fit, sketch, own)
        self._refit(workload, [s.name for s in sketches])

    def _refit(self, workload: str, names: Sequence[str]) -> None:
        fits = {n: f for n in names if (f := self._fits.get((workload, n))) is not None}
        everything = np.array([r for f in fits.values() for r in f.residuals])
        known = everything[~np.isnan(everything)]
        centre = float(known.mean()) if len(known) else 0.0
        worst = float(known.max()) if len(known) else 0.0
        self._means[workload, ""] = centre
        for name, fit in fits.items():
            y = np.array(fit.residuals)
            good = y[~np.isnan(y)]
            mean = (good.sum() + centre) / (len(good) + 1)
            self._means[workload, name] = float(mean)
            y = np.where(np.isnan(y), worst + FAILED, y)[-MAX_POINTS:] - mean
            fit.x = np.stack(fit.points[-MAX_POINTS:])
            fit.length, fit.weights = _regress(fit.x, y)


def _empty(sketch: Sketch) -> _Fit:
    columns = [
        decision_features(np.asarray(d, dtype=np.int64)[:, None])[:, 0] for d in sketch.domains
    ]
    low = np.array([c.min() for c in columns])
    span = np.array([np.ptp(c) for c in columns])
    width = np.sqrt(max(1, len(columns)))
    return _Fit(low, np.where(span > 0, span, 1.0) * width)


def _append(fit: _Fit, sketch: Sketch, results: Sequence[MeasureResult]) -> None:
    decisions = decisions_of(sketch, (r.candidate for r in results))
    predicted = log_latency(sketch, decisions)
    for row, log_s, result in zip(fit.scaled(decisions), predicted, results, strict=True):
        ok = result.status is MeasureStatus.OK
        fit.points.append(row)
        fit.residuals.append(float(np.log(max(result.latency_s, 1e-12)) - log_s) if ok else np.nan)


def _kernel(a: Array, b: Array, length: float) -> Array:
    """Squared exponential of the distance, (len(a), len(b))."""
    distance = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-0.5 * distance / length**2))


def _regress(x: Array, y: Array) -> tuple[float, Array]:
    """Length scale of the highest marginal likelihood, and weights of the points."""
    spread = max(float(np.mean(y**2)), NOISE**2)
    best: tuple[float, float, Array] | None = None
    for length in LENGTHS:
        covariance = spread * _kernel(x, x, length) + NOISE**2 * np.eye(len(x))
        factor = np.linalg.cholesky(covariance)
        half = np.linalg.solve(factor, y)
        likelihood = -0.5 * float(half @ half) - float(np.log(np.diag(factor)).sum())
        if best is None or likelihood > best[0]:
            best = (likelihood, length, spread * np.linalg.solve(factor.T, half))
    assert best is not None
    return best[1], best[2]
