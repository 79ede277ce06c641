"""Numbers that describe a point of a sketch: its decisions and its analytic symbols."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_pruner.task import MeasureStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import Candidate, MeasureResult
    from torch_pruner.tuner.cost_model.base import Array, Decisions


def signed_log2(values: np.ndarray[Any, Any]) -> Array:
    """log2(1 + |v|) with the sign of v: tile sizes become evenly spaced."""
    wide = np.nan_to_num(np.asarray(values, dtype=np.float64), nan=0.0, posinf=1e30, neginf=-1e30)
    return np.asarray(np.sign(wide) * np.log2(1.0 + np.abs(wide)))


def decision_features(decisions: Decisions) -> Array:
    return signed_log2(decisions)


def symbol_features(sketch: Sketch, decisions: Decisions) -> Array:
    """Every per-point field of the sketch's symbols, on a logarithmic scale."""
    symbols: Any = sketch.symbols(decisions)
    columns = []
    for field in dataclasses.fields(symbols):
        value = getattr(symbols, field.name)
        if isinstance(value, np.ndarray) and value.shape == (len(decisions),):
            scaled = np.log(np.clip(value, 1e-12, None)) if field.name.endswith("_s") else value
            columns.append(scaled if field.name.endswith("_s") else signed_log2(scaled))
    return np.stack(columns, axis=1) if columns else np.zeros((len(decisions), 0))


def decisions_of(sketch: Sketch, candidates: Iterable[Candidate]) -> Decisions:
    """Rows (n, d) of the given candidates, all of which must be points of ``sketch``."""
    rows = []
    for candidate in candidates:
        taken = dict(candidate.decisions)
        rows.append([taken[name] for name in sketch.names])
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(sketch.names))


def seconds_of(results: Iterable[MeasureResult]) -> list[float]:
    """Seconds per call of each result; infinite for one that failed."""
    return [max(r.latency_s, 1e-12) if r.status is MeasureStatus.OK else math.inf for r in results]
