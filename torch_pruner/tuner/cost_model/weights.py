"""Trained weights as bytes in the layout of safetensors, checked to the last byte when read.

Weights carry the feature scaling they were trained with and the version of the features; weights of
other features or shapes are refused. Nothing in a file is executed. Knows no disk.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_pruner.tuner.cost_model import network, pattern
from torch_pruner.tuner.cost_model.training import Scaling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.tuner.cost_model.layers import Numbers

MAX_BYTES = 4 << 20
_PREFIX = 8  # bytes that hold the length of the header


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters (SIZE,) in single precision, their scaling, and how often they were updated."""

    flat: Numbers
    scaling: Scaling
    updates: int = 0

    def to_bytes(self) -> bytes:
        tensors = {name: np.asarray(t, dtype="<f4") for name, t in _tensors(self).items()}
        data = b"".join(np.ascontiguousarray(t).tobytes() for t in tensors.values())
        header: dict[str, Any] = {
            "__metadata__": {
                "format": "torch_pruner pattern-aware model",
                "features": str(pattern.VERSION),
                "updates": str(self.updates),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        }
        at = 0
        for name, tensor in tensors.items():
            offsets = [at, at + tensor.nbytes]
            header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
            at = offsets[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(_PREFIX, "little") + text + data

    @staticmethod
    def from_bytes(content: bytes) -> Weights:
        """Inverse of ``to_bytes``. Raises ``ValueError`` for anything else, damage included."""
        if not _PREFIX <= len(content) <= MAX_BYTES:
            raise ValueError(f"{len(content)} bytes are no weights of this model")
        end = _PREFIX + int.from_bytes(content[:_PREFIX], "little")
        if end > len(content):
            raise ValueError("the header is cut off")
        try:
            header = json.loads(content[_PREFIX:end])
            notes = header.pop("__metadata__")
            version, updates = int(notes["features"]), int(notes["updates"])
            digest = notes["sha256"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            raise ValueError(f"the header is damaged: {err}") from err
        if version != pattern.VERSION:
            raise ValueError(f"weights for features {version}, not {pattern.VERSION}")
        data = content[end:]
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError("the weights are damaged: their digest differs")
        return _from_tensors(_views(header, data), updates)


def _shapes() -> dict[str, tuple[int, ...]]:
    scales = {"scaling.statement": (2, pattern.STATEMENT), "scaling.token": (2, pattern.TOKEN)}
    return {**network.SHAPES, **scales}


def _tensors(weights: Weights) -> dict[str, Numbers]:
    scaling = weights.scaling
    scales = {"scaling.statement": scaling.statement, "scaling.token": scaling.token}
    return {**network.named(weights.flat), **scales}


def _views(header: Mapping[str, Any], data: bytes) -> dict[str, Numbers]:
    """The tensors of a file, whose names and shapes must be exactly this model's."""
    shapes = _shapes()
    if set(header) != set(shapes):
        raise ValueError("the tensors are not those of this model")
    found = {}
    for name, shape in shapes.items():
        entry = header[name]
        size = 4 * int(np.prod(shape))
        try:
            start, end = (int(v) for v in entry["data_offsets"])
            fits = entry["dtype"] == "F32" and tuple(entry["shape"]) == shape
        except (ValueError, KeyError, TypeError) as err:
            raise ValueError(f"tensor {name} is damaged: {err}") from err
        if not fits or end - start != size or not 0 <= start <= end <= len(data):
            raise ValueError(f"tensor {name} is not {shape} numbers of single precision")
        found[name] = np.frombuffer(data[start:end], dtype="<f4").reshape(shape)
        if not np.isfinite(found[name]).all():
            raise ValueError(f"tensor {name} holds something that is no number")
    return found


def _from_tensors(tensors: Mapping[str, Numbers], updates: int) -> Weights:
    flat = np.zeros(network.SIZE, np.float32)
    for name, view in network.named(flat).items():
        view[...] = tensors[name]
    scales = [tensors[f"scaling.{k}"].astype(np.float64) for k in ("statement", "token")]
    if updates < 0 or any((s[1] <= 0).any() for s in scales):
        raise ValueError("a scale or the number of updates is not positive")
    return Weights(flat, Scaling(*scales), updates)
