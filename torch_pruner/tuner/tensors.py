"""Arrays of single precision as bytes in the layout of safetensors, checked when they are read.

Names and shapes are known before a file is read, and the digest of all numbers is in its header.
Nothing in a file is executed. Knows no disk.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIX = 8  # bytes that hold the length of the header
_DIGEST = "sha256"


def to_bytes(tensors: Mapping[str, npt.NDArray[Any]], notes: Mapping[str, str]) -> bytes:
    """``tensors`` in order, with ``notes`` in the header."""
    kept = {name: np.asarray(t, dtype="<f4") for name, t in tensors.items()}
    data = b"".join(np.ascontiguousarray(t).tobytes() for t in kept.values())
    digest = hashlib.sha256(data).hexdigest()
    header: dict[str, Any] = {"__metadata__": {**notes, _DIGEST: digest}}
    at = 0
    for name, tensor in kept.items():
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_PREFIX, "little") + text + data


def from_bytes(
    content: bytes, shapes: Mapping[str, tuple[int, ...]], version: int, limit: int
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """(tensors, notes) of a file of at most ``limit`` bytes, whose note "features" is ``version``.

    Raises ``ValueError`` for anything else: other names or shapes, damage, what is no number.
    """
    if not _PREFIX <= len(content) <= limit:
        raise ValueError(f"{len(content)} bytes are no weights of this model")
    end = _PREFIX + int.from_bytes(content[:_PREFIX], "little")
    if end > len(content):
        raise ValueError("the header is cut off")
    try:
        header = json.loads(content[_PREFIX:end])
        notes = dict(header.pop("__metadata__"))
        found, digest = int(notes["features"]), notes[_DIGEST]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ValueError(f"the header is damaged: {err}") from err
    if found != version:
        raise ValueError(f"weights for features {found}, not {version}")
    data = content[end:]
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError("the weights are damaged: their digest differs")
    return _views(header, shapes, data), notes


def _views(
    header: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], data: bytes
) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a file, whose names and shapes must be exactly those of ``shapes``."""
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
