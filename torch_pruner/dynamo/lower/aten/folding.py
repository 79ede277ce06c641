"""Sums of overlapping blocks: ``fold``, which is also the gradient of ``unfold``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.pooling_gradients import along, places
from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_pruner.dynamo.lower.aten.value import Value

aten = torch.ops.aten

_MAX_TERMS = 32


@rule(aten.col2im.default)
def fold(
    _call: OpCall,
    columns: Value,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """``columns``: (images, channels x kernel offsets, blocks), images optional.

    One axis after the other: an element is the sum of what the few blocks that cover it have there.
    """
    rank, lead = len(output_size), columns.shape[:-2]
    rows = zip(output_size, kernel_size, dilation, padding, stride, strict=True)
    blocks = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in rows]
    channels = columns.shape[-2] // math.prod(kernel_size)
    x = columns.reshape((*lead, channels, *kernel_size, *blocks)).widened()
    first = len(lead) + 1
    order = [axis for i in range(rank) for axis in (first + i, first + rank + i)]
    x = x.permute([*range(first), *order])
    merged = [k * n for k, n in zip(kernel_size, blocks, strict=True)]
    x = x.reshape((*lead, channels, *merged))
    for i, size in enumerate(output_size):
        window = (kernel_size[i], dilation[i], padding[i], stride[i])
        x = _folded(x, first + i, size, blocks[i], window)
    return x


def _folded(
    x: Value, axis: int, size: int, blocks: int, window: tuple[int, int, int, int]
) -> Value:
    """``axis`` of ``x``, kernel offsets by blocks, as ``size`` elements."""
    kernel, dilation, padding, stride = window
    if kernel == stride and dilation == 1 and padding == 0 and blocks * stride == size:
        shape = x.shape
        apart = x.reshape((*shape[:axis], kernel, blocks, *shape[axis + 1 :]))
        return apart.moved(axis + 1, axis).reshape((*shape[:axis], size, *shape[axis + 1 :]))
    total: Value | None = None
    for block, offset, inside in _covering(places(x, size, kernel * blocks) + padding, window):
        valid = inside & (block >= 0) & (block < blocks)
        place = (offset * blocks + block).maximum(0).minimum(kernel * blocks - 1)
        term = along(valid, axis, x.ndim).where(x.take(axis, place), 0.0)
        total = term if total is None else total + term
    assert total is not None
    return total


def _covering(at: Value, window: tuple[int, int, int, int]) -> Iterator[tuple[Value, Value, Value]]:
    """Blocks that may cover positions ``at``, which offset of these each is, and whether it is."""
    kernel, dilation, _, stride = window
    # Blocks one after another, each with its offset; offsets that are apart one after another.
    terms = kernel if dilation > 1 else -(-kernel // stride)
    if terms > _MAX_TERMS:
        raise arguments("fold of strongly overlapping blocks")
    for term in range(terms):
        if dilation > 1:
            begin = at - term * dilation
            block = begin.apply("floordiv", stride)
            yield block, at * 0 + term, (block * stride).equals(begin)
        else:
            block = at.apply("floordiv", stride) - term
            offset = at - block * stride
            yield block, offset, offset < kernel
