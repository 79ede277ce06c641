"""Strides, memory orders, addresses: how torch tensors lie in memory, and what kernels can take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torch_pruner.graph.memory import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides and dtype of a tensor, and the memory order in which kernels write it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    dense: bool

    @property
    def kernel_strides(self) -> tuple[int, ...]:
        return self.strides if self.dense else dense_strides(self.shape, self.order)

    @staticmethod
    def make(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> TensorSpec:
        order = memory_order(shape, strides)
        identity = tuple(range(len(shape)))
        return TensorSpec(tuple(shape), tuple(strides), dtype, order or identity, order is not None)


def spec_of(fake: torch.Tensor) -> TensorSpec:
    """What a fake tensor promises about the real one."""
    return TensorSpec.make(
        [int(d) for d in fake.shape], [int(s) for s in fake.stride()], fake.dtype
    )


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Dimensions from outermost to innermost if the elements lie densely, else None."""
    rank = len(shape)
    order = sorted(range(rank), key=lambda d: (-strides[d] if shape[d] != 1 else 0, d))
    movable = [d for d in order if shape[d] != 1]
    expected = 1
    for d in reversed(movable):
        if strides[d] != expected:
            return None
        expected *= shape[d]
    result = list(range(rank))  # dimensions of one element stay where they are
    for place, d in zip([k for k in range(rank) if shape[k] != 1], movable, strict=True):
        result[place] = d
    return tuple(result)


def takeable(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` itself when it lies as planned and aligned, else a copy that does.

    Autograd hands over zeros without memory (address 0), which copying fills in.
    """
    address = tensor.data_ptr()
    if address and address % ALIGNMENT == 0 and tensor.stride() == strides:
        return tensor
    return torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in ``order``."""
    strides = [1] * len(shape)
    step = 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)
