"""Tensors made from nothing but their shape, and masks made from positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.dynamo.lower.aten.value import Number, Value

aten = torch.ops.aten


def _filled(call: OpCall, number: Number) -> Value:
    if not isinstance(number, (bool, int, float)):
        raise arguments("a fill value that is not a real number")
    return call.const(number, call.dtype).broadcast(call.shape)


@rule(aten.full.default)
def full(
    call: OpCall, size: Sequence[int], value: Number, dtype: torch.dtype | None = None
) -> Value:
    del size, dtype
    return _filled(call, value)


@rule(aten.full_like.default, aten.new_full.default)
def full_like(
    call: OpCall, x: Value, *given: Sequence[int] | Number, dtype: torch.dtype | None = None
) -> Value:
    del x, dtype
    return _filled(call, cast("Number", given[-1]))


@rule(aten.fill.Scalar)
def fill(call: OpCall, x: Value, value: Number) -> Value:
    del x
    return _filled(call, value)


@rule(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def zeros(call: OpCall, *_given: Value | Sequence[int], dtype: torch.dtype | None = None) -> Value:
    del dtype
    return _filled(call, 0)


@rule(
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
    aten.empty_permuted.default, aten.new_empty.default, aten.new_empty_strided.default,
)  # fmt: skip
def empty(call: OpCall, *_given: Value | Sequence[int], dtype: torch.dtype | None = None) -> Value:
    """Any content will do, so it is zeros."""
    del dtype
    return _filled(call, 0)


@rule(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(call: OpCall, *_given: Value | Sequence[int], dtype: torch.dtype | None = None) -> Value:
    del dtype
    return _filled(call, 1)


@rule(aten.scalar_tensor.default)
def scalar_tensor(call: OpCall, value: Number, dtype: torch.dtype | None = None) -> Value:
    del dtype
    return _filled(call, value)


@rule(aten.arange.start_step)
def arange(
    call: OpCall,
    start: Number,
    end: Number,
    step: Number = 1,
    dtype: torch.dtype | None = None,
) -> Value:
    del end, dtype
    wide = "int64" if isinstance(start, int) and isinstance(step, int) else "float64"
    index = call.iota(call.shape, 0).cast(wide)
    scaled = index if step == 1 else index * step
    return scaled if start == 0 else scaled + start


@rule(aten.arange.start)
def arange_start(
    call: OpCall, start: Number, end: Number, dtype: torch.dtype | None = None
) -> Value:
    return arange(call, start, end, 1, dtype)


@rule(aten.arange.default)
def arange_end(call: OpCall, end: Number, dtype: torch.dtype | None = None) -> Value:
    return arange(call, 0, end, 1, dtype)


def _diagonal_offset(call: OpCall, x: Value) -> Value:
    """Column minus row of each element of the last two dims."""
    shape = x.shape[-2:]
    return call.iota(shape, 1) - call.iota(shape, 0)


@rule(aten.tril.default)
def tril(call: OpCall, x: Value, diagonal: int = 0) -> Value:
    return (_diagonal_offset(call, x) <= diagonal).where(x, 0)


@rule(aten.triu.default)
def triu(call: OpCall, x: Value, diagonal: int = 0) -> Value:
    return (_diagonal_offset(call, x) >= diagonal).where(x, 0)


@rule(aten.eye.default, aten.eye.m)
def eye(call: OpCall, *_given: Value | Sequence[int], dtype: torch.dtype | None = None) -> Value:
    del dtype
    rows, columns = call.iota(call.shape, 0), call.iota(call.shape, 1)
    return rows.equals(columns)
