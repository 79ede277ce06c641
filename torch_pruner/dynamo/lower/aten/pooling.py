"""Pooling over windows."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.pooling_gradients import (
    adaptive_matrix,
    divided_by_counts,
    spread,
    through_matrices,
)
from torch_pruner.dynamo.lower.aten.registry import OpCall, Result, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments
from torch_pruner.dynamo.lower.aten.value import Value, iota

if TYPE_CHECKING:
    from collections.abc import Sequence

aten = torch.ops.aten

_MAX_TERMS = 32


def _window(
    op: str,
    x: Value,
    size: Sequence[int],
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    dtype: str | None = None,
) -> Value:
    rank = len(kernel)
    source = x.shape[x.ndim - rank :]
    rows = zip(size, kernel, stride, padding, dilation, source, strict=True)
    hi = [max(0, (n - 1) * s + (k - 1) * d + 1 - m - p) for n, k, s, p, d, m in rows]
    shape = (*x.shape[: x.ndim - rank], *size)
    ids = x.builder.append(
        op, (x.id,), shape, dtype or x.dtype, kernel=tuple(kernel), stride=tuple(stride),
        lo=tuple(padding), hi=tuple(hi), dilation=tuple(dilation),
    )  # fmt: skip
    return Value(x.builder, ids)


def _max_pool(
    rank: int,
    call: OpCall,
    x: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Value, Value | None]:
    del ceil_mode
    kernel = spread(kernel_size, rank)
    strides = spread(stride, rank) if len(stride) else kernel
    pads, dilations = spread(padding, rank), spread(dilation, rank)
    size = call.shape[x.ndim - rank :]
    window = partial(
        _window, x=x, size=size, kernel=kernel, stride=strides, padding=pads, dilation=dilations
    )
    best = window("window_max")
    if 1 not in call.used:
        return best, None
    # Vectors of int32 have twice the lanes of int64, which indices are for who asks for them.
    positions = math.prod(x.shape[x.ndim - rank :])
    at = window("window_argmax", dtype="int32" if positions < 1 << 31 else "int64")
    return best, at.cast("int64")


rule(aten.max_pool2d_with_indices.default)(partial(_max_pool, 2))
rule(aten.max_pool3d_with_indices.default)(partial(_max_pool, 3))


def _average_pool(
    rank: int,
    call: OpCall,
    x: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    del ceil_mode
    kernel, pads = spread(kernel_size, rank), spread(padding, rank)
    strides = spread(stride, rank) if len(stride) else kernel
    size = call.shape[x.ndim - rank :]
    total = _window(
        "window_sum", x.widened(), size, kernel=kernel, stride=strides, padding=pads,
        dilation=(1,) * rank,
    )  # fmt: skip
    if divisor_override:
        return total / float(divisor_override)
    return divided_by_counts(
        total, x.shape[x.ndim - rank :], kernel=kernel, stride=strides, padding=pads,
        include_pad=count_include_pad,
    )  # fmt: skip


rule(aten.avg_pool1d.default)(partial(_average_pool, 1))
rule(aten.avg_pool2d.default)(partial(_average_pool, 2))
rule(aten.avg_pool3d.default)(partial(_average_pool, 3))


@rule(
    aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default,
    aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
)  # fmt: skip
def adaptive_average_pool(call: OpCall, x: Value, output_size: Sequence[int]) -> Value:
    rank = len(output_size)
    size, source = call.shape[x.ndim - rank :], x.shape[x.ndim - rank :]
    wide = x.widened()
    if all(n == 1 for n in size):
        return wide.mean(range(x.ndim - rank, x.ndim), keepdim=True)
    if all(m % n == 0 for m, n in zip(source, size, strict=True)):
        kernel = tuple(m // n for m, n in zip(source, size, strict=True))
        return _average_pool(rank, call, x, kernel)
    rows = zip(source, size, strict=True)
    return through_matrices(wide, [adaptive_matrix(wide, m, n) for m, n in rows])


def _adaptive_max_pool(call: OpCall, x: Value, output_size: Sequence[int]) -> Result:
    """Windows of one size, or of the largest one, which read their last element again."""
    rank = len(output_size)
    size, source = call.shape[x.ndim - rank :], x.shape[x.ndim - rank :]
    if all(m % n == 0 for m, n in zip(source, size, strict=True)):
        kernel = tuple(m // n for m, n in zip(source, size, strict=True))
        return _max_pool(rank, call, x, kernel)
    if 1 in call.used:
        raise arguments("positions of adaptive maxima over windows of several sizes")
    for i, (m, n) in enumerate(zip(source, size, strict=True)):
        x = _adaptive_maximum(x, x.ndim - rank + i, m, n)
    return x, None


rule(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)(_adaptive_max_pool)


def _adaptive_maximum(x: Value, axis: int, source: int, size: int) -> Value:
    """The maxima of ``size`` windows along one axis of ``source`` elements."""
    longest = max(-(-(i + 1) * source // size) - i * source // size for i in range(size))
    if longest > _MAX_TERMS:
        raise arguments("adaptive maxima over long windows of several sizes")
    index = iota(x.builder, size)
    first = (index * source).apply("floordiv", size)
    last = (index * source + (source + size - 1)).apply("floordiv", size) - 1
    best = x.take(axis, first)
    for step in range(1, longest):
        best = best.maximum(x.take(axis, (first + step).minimum(last)))
    return best
