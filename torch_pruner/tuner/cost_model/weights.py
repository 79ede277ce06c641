"""Trained weights as bytes in the layout of safetensors, checked to the last byte when read.

Weights carry the feature scaling they were trained with and the version of the features; weights of
other features or shapes are refused. Nothing in a file is executed. Knows no disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner import tensors
from torch_pruner.tuner.cost_model import network, pattern
from torch_pruner.tuner.cost_model.training import Scaling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.tuner.cost_model.layers import Numbers

MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters (SIZE,) in single precision, their scaling, and how often they were updated."""

    flat: Numbers
    scaling: Scaling
    updates: int = 0

    def to_bytes(self) -> bytes:
        notes = {
            "format": "torch_pruner pattern-aware model",
            "features": str(pattern.VERSION),
            "updates": str(self.updates),
        }
        return tensors.to_bytes(_tensors(self), notes)

    @staticmethod
    def from_bytes(content: bytes) -> Weights:
        """Inverse of ``to_bytes``. Raises ``ValueError`` for anything else, damage included."""
        found, notes = tensors.from_bytes(content, _shapes(), pattern.VERSION, MAX_BYTES)
        try:
            updates = int(notes["updates"])
        except (ValueError, KeyError, TypeError) as err:
            raise ValueError(f"the header is damaged: {err}") from err
        return _from_tensors(found, updates)


def _shapes() -> dict[str, tuple[int, ...]]:
    scales = {"scaling.statement": (2, pattern.STATEMENT), "scaling.token": (2, pattern.TOKEN)}
    return {**network.SHAPES, **scales}


def _tensors(weights: Weights) -> dict[str, Numbers]:
    scaling = weights.scaling
    scales = {"scaling.statement": scaling.statement, "scaling.token": scaling.token}
    return {**network.named(weights.flat), **scales}


def _from_tensors(found: Mapping[str, Numbers], updates: int) -> Weights:
    flat = np.zeros(network.SIZE, np.float32)
    for name, view in network.named(flat).items():
        view[...] = found[name]
    scales = [found[f"scaling.{k}"].astype(np.float64) for k in ("statement", "token")]
    if updates < 0 or any((s[1] <= 0).any() for s in scales):
        raise ValueError("a scale or the number of updates is not positive")
    return Weights(flat, Scaling(*scales), updates)
