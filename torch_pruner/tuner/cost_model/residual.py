"""The analytic model with its errors learned as they are measured: regression on residuals.

Per task and sketch, the residual ``log(measured) - log(predicted)`` is a Gaussian process over the
decisions: near a measured point the prediction follows the measurement, far from any it falls back
to the analytic model times the task's mean error. Fitting is one small Cholesky factorisation, so
it runs after every batch. Another prediction than the analytic one may take its place (``pacm``).
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
    from collections.abc import Callable, Sequence

    from torch_pruner.families.space import Sketch

LENGTHS = (0.15, 0.3, 0.6, 1.2)  # of the kernel, per square root of the number of decisions
NOISE = 0.05  # standard deviation of a measured log latency
FAILED = 1.5  # residual of a candidate that failed, above the worst that did not
MAX_POINTS = 400


@dataclass(slots=True)
class _Fit:
    """What was measured of one sketch of one task, and the regression on it."""

    sketch: Sketch
    low: Array
    scale: Array
    decisions: list[Decisions] = field(default_factory=list)
    log_s: list[float] = field(default_factory=list)  # measured; nan: failed
    x: Array = field(default_factory=lambda: np.zeros((0, 0)))
    weights: Array = field(default_factory=lambda: np.zeros(0))
    length: float = 1.0

    def scaled(self, decisions: Decisions) -> Array:
        return (decision_features(decisions) - self.low) / self.scale


def _analytic(task: Task, sketch: Sketch, decisions: Decisions) -> Array:
    return log_latency(sketch, decisions)


class ResidualModel(CostModel):
    """Minus the logarithm of the corrected latency.

    ``prior`` gives the logarithm of the seconds that are corrected. If it changes, ``refit``.
    """

    def __init__(self, prior: Callable[[Task, Sketch, Decisions], Array] = _analytic) -> None:
        self._prior = prior
        self._fits: dict[tuple[str, str], _Fit] = {}
        self._means: dict[tuple[str, str], float] = {}

    def predict(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array:
        score = -self._prior(task, sketch, decisions)
        workload = task.workload
        mean = self._means.get((workload, sketch.name), self._means.get((workload, ""), 0.0))
        fit = self._fits.get((workload, sketch.name))
        if fit is None or not len(fit.x):
            return score - mean
        return score - mean - _kernel(fit.scaled(decisions), fit.x, fit.length) @ fit.weights

    def update(
        self, task: Task, sketches: Sequence[Sketch], results: Sequence[MeasureResult]
    ) -> None:
        for sketch in sketches:
            own = [r for r in results if r.candidate.sketch == sketch.name]
            if own:
                fit = self._fits.setdefault((task.workload, sketch.name), _empty(sketch))
                _append(fit, sketch, own)
        self.refit(task)

    def refit(self, task: Task) -> None:
        """The regressions of a task anew, on what was measured of it."""
        workload = task.workload
        fits = {name: fit for (w, name), fit in self._fits.items() if w == workload}
        residuals = {
            name: np.array(fit.log_s) - self._prior(task, fit.sketch, np.stack(fit.decisions))
            for name, fit in fits.items()
        }
        everything = np.concatenate([*residuals.values(), np.zeros(0)])
        known = everything[~np.isnan(everything)]
        centre = float(known.mean()) if len(known) else 0.0
        worst = float(known.max()) if len(known) else 0.0
        self._means[workload, ""] = centre
        for name, fit in fits.items():
            y = residuals[name]
            good = y[~np.isnan(y)]
            mean = (good.sum() + centre) / (len(good) + 1)
            self._means[workload, name] = float(mean)
            y = np.where(np.isnan(y), worst + FAILED, y)[-MAX_POINTS:] - mean
            fit.x = fit.scaled(np.stack(fit.decisions[-MAX_POINTS:]))
            fit.length, fit.weights = _regress(fit.x, y)


def _empty(sketch: Sketch) -> _Fit:
    columns = [
        decision_features(np.asarray(d, dtype=np.int64)[:, None])[:, 0] for d in sketch.domains
    ]
    low = np.array([c.min() for c in columns])
    span = np.array([np.ptp(c) for c in columns])
    width = np.sqrt(max(1, len(columns)))
    return _Fit(sketch, low, np.where(span > 0, span, 1.0) * width)


def _append(fit: _Fit, sketch: Sketch, results: Sequence[MeasureResult]) -> None:
    fit.decisions.extend(decisions_of(sketch, (r.candidate for r in results)))
    ok = MeasureStatus.OK
    fit.log_s.extend(
        float(np.log(max(r.latency_s, 1e-12))) if r.status is ok else np.nan for r in results
    )


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
