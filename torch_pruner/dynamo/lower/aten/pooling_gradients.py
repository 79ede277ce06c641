"""Gradients of pooling, as sums over the few windows that cover an element.

Also what they share with pooling: window sizes and divisors.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments
from torch_pruner.dynamo.lower.aten.value import Value, iota

if TYPE_CHECKING:
    from collections.abc import Sequence

aten = torch.ops.aten

_MAX_TERMS = 32


def spread(values: Sequence[int] | int, rank: int) -> tuple[int, ...]:
    """One value per dim: torch lets a single one stand for all."""
    if isinstance(values, int):
        return (values,) * rank
    return tuple(values) * rank if len(values) == 1 else tuple(values)


def along(vector: Value, axis: int, ndim: int) -> Value:
    """A vector shaped to broadcast over all dims but ``axis``."""
    return vector.reshape([vector.shape[0] if d == axis else 1 for d in range(ndim)])


def divided_by_counts(
    total: Value,
    source: Sequence[int],
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    include_pad: bool,
) -> Value:
    """Window sums divided by how many elements of ``source`` each window covers."""
    rank, uniform = len(kernel), 1
    for i in range(rank):
        axis = total.ndim - rank + i
        index = iota(total.builder, total.shape[axis])
        start = index * stride[i] - padding[i]
        end = (start + kernel[i]).minimum(source[i] + padding[i])
        counts = _counts(
            total.shape[axis], source[i], kernel[i], stride[i], padding[i], include_pad
        )
        if len(set(counts)) == 1:
            uniform *= counts[0]
            continue
        vector = end - start if include_pad else end.minimum(source[i]) - start.maximum(0)
        total = total / along(vector.cast(total.dtype), axis, total.ndim)
    return total if uniform == 1 else total / float(uniform)


def _counts(
    size: int, source: int, kernel: int, stride: int, padding: int, include_pad: bool
) -> list[int]:
    """How many elements each window of one dim averages over."""
    counts = []
    for i in range(size):
        start = i * stride - padding
        end = min(start + kernel, source + padding)
        counts.append(end - start if include_pad else min(end, source) - max(start, 0))
    return counts


def adaptive_matrix(x: Value, source: int, size: int) -> Value:
    """(source, size): the weight of each element in each bin of adaptive averaging."""
    start, end = iota(x.builder, size) * source, iota(x.builder, size) * source + source
    start = start.apply("floordiv", size)
    end = (end + (size - 1)).apply("floordiv", size)
    row = iota(x.builder, source).unsqueeze(1)
    inside = (row >= start) & (row < end)
    return inside.cast(x.dtype) / (end - start).cast(x.dtype)


def through_matrices(x: Value, matrices: Sequence[Value]) -> Value:
    """Each trailing dim of ``x`` multiplied from the right by its matrix."""
    rank = len(matrices)
    for i, matrix in enumerate(matrices):
        axis = x.ndim - rank + i
        last = x.moved(axis, x.ndim - 1)
        flat = last.reshape((math.prod(last.shape[:-1]), last.shape[-1])).matmul(matrix)
        x = flat.reshape((*last.shape[:-1], matrix.shape[1])).moved(x.ndim - 1, axis)
    return x


def places(x: Value, count: int, positions: int) -> Value:
    """0 to ``count``, in integers that hold twice ``positions`` and are no wider than need be.

    Indices are int64 for who asks for them; vectors of int32 have twice the lanes.
    """
    return iota(x.builder, count, dtype="int32" if positions < 1 << 30 else "int64")


def _row_major(lines: Sequence[Value], source: Sequence[int]) -> Value:
    flat: Value | None = None
    for i, (line, extent) in enumerate(zip(lines, source, strict=True)):
        shaped = along(line, i, len(lines))
        flat = shaped if flat is None else flat * extent + shaped
    assert flat is not None
    return flat


@rule(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(
    _call: OpCall,
    grad: Value,
    x: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Value,
) -> Value:
    """The sum over the windows that may cover an element of those whose maximum it was."""
    del ceil_mode
    kernel, dilations = spread(kernel_size, 2), spread(dilation, 2)
    strides, pads = (spread(stride, 2) if len(stride) else kernel), spread(padding, 2)
    lead, source = x.ndim - 2, x.shape[-2:]
    reach = [-(-((k - 1) * d + 1) // s) for k, d, s in zip(kernel, dilations, strides, strict=True)]
    if math.prod(reach) > _MAX_TERMS:
        raise arguments("gradient of max pooling over strongly overlapping windows")
    here = _row_major([places(x, n, math.prod(source)) for n in source], source)
    total: Value | None = None
    for steps in itertools.product(*(range(r) for r in reach)):
        part, chosen = grad.widened(), indices.cast(here.dtype)
        inside: Value | None = None
        for i, back in enumerate(steps):
            axis, count = lead + i, grad.shape[lead + i]
            window = (iota(x.builder, source[i]) + pads[i]).apply("floordiv", strides[i]) - back
            valid = along((window >= 0) & (window < count), i, 2)
            window = window.maximum(0).minimum(count - 1)
            part, chosen = part.take(axis, window), chosen.take(axis, window)
            inside = valid if inside is None else inside & valid
        assert inside is not None
        term = (chosen.equals(here) & inside).where(part, 0.0)
        total = term if total is None else total + term
    assert total is not None
    return total


@rule(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(call: OpCall, grad: Value, x: Value, indices: Value) -> Value:
    source, size = x.shape[-2:], grad.shape[-2:]
    if any(m % n for m, n in zip(source, size, strict=True)):
        raise arguments("gradient of adaptive maxima over windows of several sizes")
    kernel = [m // n for m, n in zip(source, size, strict=True)]
    return max_pool2d_backward(call, grad, x, kernel, kernel, (0, 0), (1, 1), False, indices)


def _unpooled(
    grad: Value,
    source: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Value:
    """For each element the sum of ``grad`` over the windows that cover it."""
    rank = len(kernel)
    for i in range(rank):
        axis, out = grad.ndim - rank + i, None
        count = grad.shape[axis]
        position = iota(grad.builder, source[i]) + padding[i]
        if -(-kernel[i] // stride[i]) > _MAX_TERMS:
            raise arguments("gradient of average pooling over strongly overlapping windows")
        for back in range(-(-kernel[i] // stride[i])):
            window = position.apply("floordiv", stride[i]) - back
            covers = (position - window * stride[i]) < kernel[i]
            valid = (window >= 0) & (window < count) & covers
            part = grad.take(axis, window.maximum(0).minimum(count - 1))
            term = along(valid, axis, grad.ndim).where(part, 0.0)
            out = term if out is None else out + term
        assert out is not None
        grad = out
    return grad


@rule(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def average_pool_backward(
    _call: OpCall,
    grad: Value,
    x: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    del ceil_mode
    rank = len(kernel_size)
    if rank < 2:
        raise arguments("gradient of average pooling with one kernel size for all dims")
    kernel, pads = tuple(kernel_size), spread(padding, rank)
    strides = spread(stride, rank) if len(stride) else kernel
    source = x.shape[x.ndim - rank :]
    if divisor_override:
        share = grad.widened() / float(divisor_override)
    else:
        share = divided_by_counts(
            grad.widened(), source, kernel=kernel, stride=strides, padding=pads,
            include_pad=count_include_pad,
        )  # fmt: skip
    return _unpooled(share, source, kernel, strides, pads)


@rule(aten._adaptive_avg_pool2d_backward.default)
def adaptive_average_pool2d_backward(_call: OpCall, grad: Value, x: Value) -> Value:
    return _adaptive_backward(grad, x, 2)


@rule(aten._adaptive_avg_pool3d_backward.default)
def adaptive_average_pool3d_backward(_call: OpCall, grad: Value, x: Value) -> Value:
    return _adaptive_backward(grad, x, 3)


def _adaptive_backward(grad: Value, x: Value, rank: int) -> Value:
    source, size = x.shape[x.ndim - rank :], grad.shape[grad.ndim - rank :]
    wide = grad.widened()
    if all(m % n == 0 for m, n in zip(source, size, strict=True)):
        kernel = [m // n for m, n in zip(source, size, strict=True)]
        share = wide / float(math.prod(kernel))
        return _unpooled(share, source, kernel, kernel, [0] * rank)
    rows = zip(source, size, strict=True)
    return through_matrices(wide, [adaptive_matrix(wide, m, n).swapped() for m, n in rows])
