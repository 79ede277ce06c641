"""Copies of rows by a compiled program, on the threads of its kernels.

torch's own threads go on waiting for work for a while after they had some, where those of kernels
want to run; and one thread takes as long for a cache as kernels do for a token.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from torch_pruner.dynamo.lower.tensors import TensorSpec

__all__ = ["RowCopier", "Rows"]


class Rows(NamedTuple):
    """How the first elements of a tensor are copied: bytes from one row to the next in the target
    and in the source, rows, and bytes of a row."""

    target_step: int
    source_step: int
    rows: int
    nbytes: int

    @staticmethod
    def of(target: TensorSpec, source: TensorSpec) -> Rows | None:
        """The rows of ``target`` in ``source``, which is longer along one axis; both row-major.

        None where they are something else.
        """
        if target.dtype != source.dtype or len(target.shape) != len(source.shape):
            return None
        pairs = enumerate(zip(target.shape, source.shape, strict=True))
        axes = [axis for axis, (n, most) in pairs if n != most]
        if len(axes) != 1 or not all(_row_major(spec) for spec in (target, source)):
            return None
        outer, size = target.shape[: axes[0]], target.dtype.itemsize
        steps = [math.prod(spec.shape[axes[0] :]) * size for spec in (target, source)]
        return Rows(steps[0], steps[1], math.prod(outer), steps[0])


def _row_major(spec: TensorSpec) -> bool:
    dense = [math.prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape))]
    return list(spec.strides) == dense


@dataclass(frozen=True, slots=True)
class RowCopier:
    """The entry ``graph.memory.COPIES`` of a program, and for how many threads that is."""

    entry: Callable[[int], object]
    threads: int

    def __call__(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor, Rows]]) -> None:
        """Copy (target, source, rows) each. Both are in host memory."""
        numbers = [self.threads, len(copies)]
        for target, source, rows in copies:
            numbers += (target.data_ptr(), source.data_ptr(), *rows)
        table = (ctypes.c_int64 * len(numbers))(*numbers)
        self.entry(ctypes.addressof(table))
