"""Window and contraction operators of the reference interpreter: loops over kernel offsets."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_pruner.graph.ir import Node


def contract(node: Node, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """matmul, conv or conv_transpose of widened operands."""
    match node.op:
        case "matmul":
            return np.asarray(np.matmul(a, b))
        case "conv":
            return _conv(node, a, b)
    return _conv_transpose(node, a, b)


def window(node: Node, x: np.ndarray) -> np.ndarray:
    """Maximum, its position, or sum over sliding windows of the trailing dims."""
    if node.op == "window_argmax":
        return _window_argmax(node, x)
    kernel, stride, dilation = (node.attr(k) for k in ("kernel", "stride", "dilation"))
    rank = len(kernel)
    size = node.shape[x.ndim - rank :]
    combine: np.ufunc = np.add if node.op == "window_sum" else np.maximum
    fill = 0 if node.op == "window_sum" else _lowest(x.dtype)
    padded = _padded(x, node.attr("lo"), _extent(size, stride, kernel, dilation), fill)
    out: np.ndarray | None = None
    for offset in _offsets(kernel):
        part = padded[(..., *_strided(offset, dilation, stride, size))]
        out = part if out is None else combine(out, part)
    assert out is not None
    return out


def _window_argmax(node: Node, x: np.ndarray) -> np.ndarray:
    kernel, stride, dilation = (node.attr(k) for k in ("kernel", "stride", "dilation"))
    source = x.shape[x.ndim - len(kernel) :]
    size = node.shape[x.ndim - len(kernel) :]
    best = np.full(node.shape, _lowest(x.dtype), x.dtype)
    found = np.full(node.shape, -1)
    for offset in _offsets(kernel):
        rows = zip(offset, dilation, size, stride, node.attr("lo"), strict=True)
        places = np.ix_(*(np.arange(n) * s + o * d - lo for o, d, n, s, lo in rows))
        inside = np.ones(size, bool)
        position = np.zeros(size, np.int64)
        for place, extent in zip(places, source, strict=True):
            inside = inside & (place >= 0) & (place < extent)
            position = position * extent + place
        value = x[(..., *(np.clip(p, 0, m - 1) for p, m in zip(places, source, strict=True)))]
        nan = np.isnan(value) if x.dtype.kind == "f" else False
        better = inside & ((found < 0) | (value > best) | nan)
        best, found = np.where(better, value, best), np.where(better, position, found)
    return np.asarray(np.maximum(found, 0))


def _lowest(dtype: np.dtype) -> float:
    return -np.inf if dtype.kind == "f" else int(np.iinfo(dtype).min)


def _conv(node: Node, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    stride, dilation, groups = (node.attr(k) for k in ("stride", "dilation", "groups"))
    kernel, size = w.shape[2:], node.shape[2:]
    padded = _padded(x, node.attr("lo"), _extent(size, stride, kernel, dilation), 0)
    n, c, o = x.shape[0], x.shape[1], w.shape[0]
    out = np.zeros((n, groups, o // groups, math.prod(size)), np.result_type(x, w))
    for offset in _offsets(kernel):
        part = padded[(..., *_strided(offset, dilation, stride, size))]
        columns = part.reshape(n, groups, c // groups, -1)
        taps = w[(..., *offset)].reshape(groups, o // groups, c // groups)
        out += np.matmul(taps, columns)
    return out.reshape(node.shape)


def _conv_transpose(node: Node, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    stride, dilation, groups = (node.attr(k) for k in ("stride", "dilation", "groups"))
    lo = node.attr("lo")
    kernel, source, size = w.shape[2:], x.shape[2:], node.shape[2:]
    n, c, o = x.shape[0], x.shape[1], node.shape[1]
    reach = _extent(source, stride, kernel, dilation)
    full = [max(r, p + s) for r, p, s in zip(reach, lo, size, strict=True)]
    out = np.zeros((n, o, *full), np.result_type(x, w))
    columns = x.reshape(n, groups, c // groups, -1)
    for offset in _offsets(kernel):
        taps = w[(..., *offset)].reshape(groups, c // groups, o // groups)
        part = np.matmul(taps.transpose(0, 2, 1), columns).reshape(n, o, *source)
        out[(..., *_strided(offset, dilation, stride, source))] += part
    inner: list[Any] = [slice(p, p + s) for p, s in zip(lo, size, strict=True)]
    return out[(..., *inner)]


def _offsets(kernel: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    return itertools.product(*(range(k) for k in kernel))


def _extent(
    size: Sequence[int], stride: Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """How many source elements ``size`` windows reach over, per dim."""
    rows = zip(size, stride, kernel, dilation, strict=True)
    return [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in rows]


def _strided(
    offset: Sequence[int], dilation: Sequence[int], stride: Sequence[int], size: Sequence[int]
) -> tuple[Any, ...]:
    rows = zip(offset, dilation, stride, size, strict=True)
    return tuple(slice(o * d, o * d + (n - 1) * s + 1, s) for o, d, s, n in rows)


def _padded(x: np.ndarray, lo: Sequence[int], extent: Sequence[int], fill: float) -> np.ndarray:
    """``x`` with ``lo`` elements before and enough after each trailing dim to hold ``extent``."""
    lead = x.ndim - len(lo)
    sizes = [max(p + n, e) for p, n, e in zip(lo, x.shape[lead:], extent, strict=True)]
    out = np.full((*x.shape[:lead], *sizes), fill, x.dtype)
    inner: list[Any] = [slice(p, p + n) for p, n in zip(lo, x.shape[lead:], strict=True)]
    out[(..., *inner)] = x
    return out
