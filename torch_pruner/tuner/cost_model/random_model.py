"""Chance as a cost model: the control group for verification."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.cost_model.base import Array, CostModel, Decisions

if TYPE_CHECKING:
    from torch_pruner.families.space import Sketch
    from torch_pruner.task import Task

_M1, _M2, _GOLDEN = (
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
    np.uint64(0x9E3779B97F4A7C15),
)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a good 64-bit hash of integers."""
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return np.asarray(x ^ (x >> np.uint64(31)))


class RandomModel(CostModel):
    """Scores in [0, 1) that are a hash of the seed, the task and the decisions."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def predict(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array:
        text = f"{self._seed}/{task.workload}/{sketch.name}"
        state = np.full(len(decisions), zlib.crc32(text.encode()), dtype=np.uint64)
        for column in np.asarray(decisions, dtype=np.int64).T:
            state = _mix(state * _GOLDEN + column.astype(np.uint64) + _GOLDEN)
        return np.asarray((_mix(state) >> np.uint64(11)).astype(np.float64) / float(1 << 53))
