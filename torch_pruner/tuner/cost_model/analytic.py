"""The draft model alone: the sketch's predicted latency as a score."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.cost_model.base import Array, CostModel, Decisions

if TYPE_CHECKING:
    from torch_pruner.families.space import Sketch
    from torch_pruner.task import Task

TINY_S, HUGE_S = 1e-12, 1e6


def log_latency(sketch: Sketch, decisions: Decisions) -> Array:
    """Natural logarithm of the predicted seconds, bounded so that it is always finite."""
    seconds = np.asarray(sketch.symbols(decisions).latency_s, dtype=np.float64)
    return np.log(np.clip(np.nan_to_num(seconds, nan=HUGE_S), TINY_S, HUGE_S))


class AnalyticModel(CostModel):
    """Minus the logarithm of the analytic latency."""

    def predict(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array:
        return -log_latency(sketch, decisions)
