"""Tensors as numpy's arrays, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torch_pruner.devices.dtypes import DTYPES

Array = npt.NDArray[Any]


def to_numpy(tensor: torch.Tensor) -> Array:
    """A view of a CPU tensor, a copy of another device's; bfloat16 by way of its bits."""
    plain = tensor.detach().resolve_neg().cpu()
    if plain.dtype is torch.bfloat16:
        import ml_dtypes

        bits: Array = plain.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: Array = plain.numpy()
    return array


def from_numpy(array: Array, dtype: str) -> torch.Tensor:
    """A copy in memory that torch allocated, and so aligned."""
    plain = np.asarray(array, order="C")  # ascontiguousarray would give a scalar a dimension
    if not plain.flags.writeable:  # torch warns of those, though nothing is written here
        plain = plain.copy()
    if dtype == "bfloat16":
        bits = torch.from_numpy(plain.view(np.int16))
        return torch.empty(array.shape, dtype=torch.bfloat16).copy_(bits.view(torch.bfloat16))
    source = torch.from_numpy(plain)
    return torch.empty(array.shape, dtype=DTYPES[dtype]).copy_(source)
