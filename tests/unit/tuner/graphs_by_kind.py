"""Small kernel graphs of every kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.ir import Graph, GraphBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence


def matmul(
    rows: int, depth: int, columns: int, *, static: bool = True, dtype: str = "float32"
) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (rows, depth), dtype)
    w = b.input(1, (depth, columns), dtype, static=static)
    return b.finish([b.pointwise("relu", b.matmul(x, w))])


def few_rows(rows: int, depth: int, columns: int, dtype: str = "float32") -> Graph:
    """As a linear layer of torch's has its weights: along the reduction."""
    b = GraphBuilder()
    x = b.input(0, (rows, depth), dtype)
    w = b.input(1, (columns, depth), dtype, static=True)
    return b.finish([b.pointwise("relu", b.matmul(x, b.permute(w, (1, 0))))])


def coded_rows(depth: int = 256, columns: int = 96) -> Graph:
    """A row times a weight that twelve bits are enough for."""
    b = GraphBuilder()
    x = b.input(0, (1, depth), "float32")
    w = b.input(1, (columns, depth), "bfloat16", static=True, coded=True)
    product = b.append("matmul", (x, b.permute(w, (1, 0))), (1, columns), "float32")
    return b.finish([b.pointwise("relu", product)])


def int4(rows: int, depth: int = 200, columns: int = 96, *, offsets: bool = False) -> Graph:
    """Weights of four bits in groups of 64."""
    b = GraphBuilder()
    x, groups = b.input(0, (rows, depth), "float32"), -(-depth // 64)
    words = b.input(1, (-(-depth // 8), columns), "int32", static=True)
    count = 2 if offsets else 1
    scales = [b.input(2 + i, (groups, columns), "float32", static=True) for i in range(count)]
    total = b.append(
        "matmul_grouped", (x, words, *scales), (rows, columns), "float32", bits=4, group=64
    )
    return b.finish([b.pointwise("relu", total)])


def byte_product(rows: int = 5, depth: int = 67, columns: int = 96, first: str = "int8") -> Graph:
    """Sums of bytes times bytes."""
    b = GraphBuilder()
    x, w = b.input(0, (rows, depth), first), b.input(1, (depth, columns), "int8", static=True)
    return b.finish([b.append("matmul", (x, w), (rows, columns), "int32")])


def keys(heads: int = 4, shared: int = 2, length: int = 40, depth: int = 16) -> Graph:
    """One query of every head by keys that heads share."""
    b = GraphBuilder()
    q = b.input(0, (1, heads * shared, 1, depth), "float32")
    k = b.input(1, (1, heads, length, depth), "float32")
    wide = b.broadcast(
        b.reshape(k, (1, heads, 1, length, depth)), (1, heads, shared, length, depth)
    )
    k = b.permute(b.reshape(wide, (1, heads * shared, length, depth)), (0, 1, 3, 2))
    return b.finish([b.matmul(q, k)])


def convolution(groups: int = 1, op: str = "conv", kernel: int = 3) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (1, 16, 14, 14), "float32")
    w = b.input(1, (16, 16 // groups, kernel, kernel), "float32", static=True)
    pad = (kernel // 2,) * 2
    both = {"stride": (1, 1), "lo": pad, "dilation": (1, 1), "groups": groups}
    if op == "conv":
        both["hi"] = pad
    return b.finish([b.append(op, (x, w), (1, 16, 14, 14), "float32", **both)])


def softmax(shape: tuple[int, ...] = (4, 32, 64), axis: int = 2, dtype: str = "float32") -> Graph:
    b = GraphBuilder()
    x = b.input(0, shape, dtype)
    e = b.pointwise("exp", b.pointwise("sub", x, b.reduce("max", x, (axis,), keepdim=True)))
    return b.finish([b.pointwise("div", e, b.reduce("sum", e, (axis,), keepdim=True))])


def reduction(axes: tuple[int, ...] = (0,), op: str = "sum", dtype: str = "float32") -> Graph:
    b = GraphBuilder()
    x = b.input(0, (8, 16, 48), dtype)
    return b.finish([b.reduce(op, x, axes, dtype="int64" if op.startswith("arg") else dtype)])


def pooling() -> Graph:
    b = GraphBuilder()
    x = b.permute(b.input(0, (1, 14, 14, 24), "float32"), (0, 3, 1, 2))
    two = (2, 2)
    y = b.append(
        "window_max", (x,), (1, 24, 7, 7), "float32", kernel=two, stride=two, lo=(0, 0),
        hi=(0, 0), dilation=(1, 1),
    )  # fmt: skip
    return b.finish([b.permute(y, (0, 2, 3, 1))])


def located_pooling(stride: int = 2, dtype: str = "float32") -> Graph:
    """A maximum and its position, windows moving along the axis in which values lie."""
    b = GraphBuilder()
    x = b.input(0, (2, 7, 39), dtype)
    size = (6 // stride + 1, 38 // stride + 1)
    ends = {"stride": (stride,) * 2, "lo": (1, 1), "hi": (1, 1), "dilation": (1, 1)}
    best = b.append("window_max", (x,), (2, *size), dtype, kernel=(3, 3), **ends)
    place = b.append("window_argmax", (x,), (2, *size), "int32", kernel=(3, 3), **ends)
    return b.finish([best, b.cast(place, "int64")])


def pointwise(shape: tuple[int, ...] = (64, 50), dtype: str = "float32") -> Graph:
    b = GraphBuilder()
    return b.finish([b.pointwise("tanh", b.input(0, shape, dtype))])


def update(*, in_place: bool = True) -> Graph:
    """Rows of a key/value cache."""
    b = GraphBuilder()
    cache, rows = b.input(0, (2, 40, 24), "float32"), b.input(2, (2, 3, 24), "float32")
    index = b.input(1, (3,), "int64")
    put = (cache, b.pointwise("tanh", rows), index)
    return b.finish([b.append("update", put, (2, 40, 24), "float32", dim=1, in_place=in_place)])


def recurrence(
    op: str = "lstm",
    units: int = 20,
    *,
    rows: int = 4,
    steps: int = 3,
    directions: int = 2,
    static: bool = True,
) -> Graph:
    """The steps of a recurrent layer, its last direction backwards."""
    b, gates = GraphBuilder(), {"lstm": 4, "gru": 3}.get(op, 1)
    given = b.input(0, (steps, rows, directions, gates, units), "float32")
    weights = b.input(1, (directions, units, gates * units), "float32", static=static)
    operands = [given, weights, b.input(2, (directions, rows, units), "float32")]
    if gates > 1:
        shape = (directions, rows, units) if op == "lstm" else (directions, units)
        operands.append(b.input(3, shape, "float32"))
    reverse = (0, 1)[-directions:]
    more = {"cells": 1} if op == "lstm" else {}
    shape = (steps + sum(more.values()), rows, directions, units)
    return b.finish([b.append(op, operands, shape, "float32", reverse=reverse, **more)])


def grouped(
    rows: int = 24,
    depth: int = 64,
    columns: int = 40,
    groups: int = 3,
    *,
    along_k: bool = True,
    dtype: str = "float32",
) -> Graph:
    """Rows in groups, each group times a matrix of its own."""
    b = GraphBuilder()
    x = b.input(0, (rows, depth), dtype)
    if along_k:
        matrices = b.permute(b.input(1, (groups, columns, depth), dtype, static=True), (0, 2, 1))
    else:
        matrices = b.input(1, (groups, depth, columns), dtype, static=True)
    ends = b.input(2, (groups,), "int32")
    return b.finish([b.append("grouped_mm", (x, matrices, ends), (rows, columns), dtype)])


def turned() -> Graph:
    """As in the gradient of a linear layer's weights."""
    b = GraphBuilder()
    x, y = b.input(0, (96, 64), "float32"), b.input(1, (96, 80), "float32")
    return b.finish([b.matmul(b.permute(x, (1, 0)), y)])


def weight_gradient(channels: int = 16, out: int = 32) -> Graph:
    """Of a convolution's weights, all operands channels last."""
    b = GraphBuilder()
    x = b.permute(b.input(0, (2, 14, 14, channels), "float32"), (3, 0, 1, 2))
    grad = b.permute(b.input(1, (2, 14, 14, out), "float32"), (3, 0, 1, 2))
    one = (1, 1)
    y = b.append(
        "conv", (x, grad), (channels, out, 3, 3), "float32", stride=one, lo=one, hi=one,
        dilation=one, groups=1,
    )  # fmt: skip
    return b.finish([b.permute(y, (1, 0, 2, 3))])


def depthwise_transposed(
    channels: int,
    size: Sequence[int],
    kernel: int,
    stride: int,
    pad: int,
    *,
    more: int = 0,
    dilation: int = 1,
    batch: int = 1,
    static: bool = False,
) -> Graph:
    """A transposed convolution of each channel for itself, ``more`` positions padded at the end,
    and what depends on where its result lies; channels last."""
    b, rank = GraphBuilder(), len(size)
    reach = dilation * (kernel - 1) + 1
    extent = tuple((n - 1) * stride - 2 * pad + reach + more for n in size)
    last = (0, rank + 1, *range(1, rank + 1))
    x = b.permute(b.input(0, (batch, *size, channels), "float32"), last)
    w = b.input(1, (channels, 1, *(kernel,) * rank), "float32", static=static)
    y = b.append(
        "conv_transpose", (x, w), (batch, channels, *extent), "float32", stride=(stride,) * rank,
        lo=(pad,) * rank, dilation=(dilation,) * rank, groups=channels,
    )  # fmt: skip
    beside = b.permute(b.input(2, (batch, *extent, channels), "float32"), last)
    y = b.pointwise("mul", y, beside)
    return b.finish([b.permute(y, (0, *range(2, rank + 2), 1))])


def crossed(
    shape: Sequence[int], perm: Sequence[int], dtype: str = "float32", *, after: bool = False
) -> Graph:
    """An operand that lies across, another that does not, and what is made of the first alone."""
    b = GraphBuilder()
    x = b.input(0, tuple(shape), dtype)
    y = b.input(1, tuple(shape[p] for p in perm), dtype)
    turned = b.permute(x if after else b.pointwise("neg", x), perm)
    turned = b.pointwise("neg", turned) if after else turned
    return b.finish([b.pointwise("add", turned, y), b.pointwise("mul", y, y)])


def depthwise_gradient(
    channels: int,
    size: Sequence[int],
    kernel: int,
    stride: int = 1,
    pad: int = 1,
    *,
    dilation: int = 1,
    batch: int = 2,
    dtype: str = "float32",
    last: bool = True,
) -> Graph:
    """As ``convolution_backward`` is lowered; ``last``: operands lie channels last."""
    b, rank = GraphBuilder(), len(size)
    axes = (0, rank + 1, *range(1, rank + 1))
    reach = dilation * (kernel - 1) + 1
    result = tuple((n + 2 * pad - reach) // stride + 1 for n in size)
    cut = tuple(min(n, (r - 1) * stride + reach - pad) for n, r in zip(size, result, strict=True))

    def operand(index: int, space: Sequence[int]) -> int:
        if last:
            return b.permute(b.input(index, (batch, *space, channels), dtype), axes)
        return b.input(index, (batch, channels, *space), dtype)

    x, grad = operand(0, size), operand(1, result)
    if cut != tuple(size):
        x = b.append(
            "slice", (x,), (batch, channels, *cut), dtype, starts=(0,) * (rank + 2),
            steps=(1,) * (rank + 2),
        )  # fmt: skip
    x = b.reshape(x, (batch, channels, 1, *cut))
    x = b.permute(x, (2, 1, 0, *range(3, 3 + rank)))
    x = b.reshape(x, (1, channels * batch, *cut))
    taps = b.permute(grad, (1, 0, *range(2, 2 + rank)))
    hi = tuple((r - 1) * stride + reach - n - pad for n, r in zip(cut, result, strict=True))
    y = b.append(
        "conv", (x, taps), (1, channels, *(kernel,) * rank), dtype, stride=(dilation,) * rank,
        lo=(pad,) * rank, hi=hi, dilation=(stride,) * rank, groups=channels,
    )  # fmt: skip
    y = b.permute(y, (1, 0, *range(2, 2 + rank)))
    return b.finish([b.pointwise("mul", y, b.const(0.5, dtype))])
