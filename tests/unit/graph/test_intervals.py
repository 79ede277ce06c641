"""Ranges of whole numbers hold what the reference interpreter computes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from torch_pruner.graph.intervals import interval, limits
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.reference import evaluate

RANGES = ((0, 6), (-3, 4), (2, 5), (-9, -2), (0, 0))
BINARY = (
    "add", "sub", "mul", "maximum", "minimum", "mod", "floordiv", "truncdiv", "fmod", "bitwise_and",
    "bitwise_or", "shift_left",
)  # fmt: skip


def clamped(b: GraphBuilder, x: int, low: int, high: int) -> int:
    x = b.pointwise("maximum", x, b.const(low, b.dtype(x)))
    return b.pointwise("minimum", x, b.const(high, b.dtype(x)))


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("dtype", ["int64", "int8"])
def test_every_result_lies_within(op: str, dtype: str) -> None:
    values = np.arange(-10, 11).astype(dtype)
    left, right = (a.ravel() for a in np.meshgrid(values, values))
    for one, other in itertools.product(RANGES, repeat=2):
        b = GraphBuilder()
        x, y = (b.input(k, (left.size,), dtype) for k in range(2))
        x, y = clamped(b, x, *one), clamped(b, y, *other)
        assert (interval(b.nodes, x), interval(b.nodes, y)) == (one, other)
        out = b.pointwise(op, x, y)
        low, high = interval(b.nodes, out)
        (got,) = evaluate(b.finish([out]), [left, right])
        assert low <= got.min()
        assert got.max() <= high


def test_what_wraps_may_be_anything() -> None:
    b = GraphBuilder()
    x = clamped(b, b.input(0, (4,), "int8"), 0, 100)
    assert interval(b.nodes, b.pointwise("add", x, x)) == limits("int8")
    assert interval(b.nodes, b.cast(clamped(b, b.input(1, (4,), "int64"), 0, 300), "uint8")) == (
        0,
        255,
    )


def test_positions() -> None:
    b = GraphBuilder()
    iota = b.append("iota", (), (3, 5), "int64", dim=1)
    shifted = b.pointwise("add", b.permute(iota, (1, 0)), b.const(2, "int64"))
    assert interval(b.nodes, shifted) == (2, 6)
    x = b.input(0, (4, 9), "float32")
    assert interval(b.nodes, b.append("argmax", (x,), (4,), "int64", axes=(1,))) == (0, 8)
    assert interval(b.nodes, b.append("cast", (x,), (4, 9), "int64")) == limits("int64")
    test = b.append("lt", (x, x), (4, 9), "bool")
    assert interval(b.nodes, b.cast(test, "int64")) == (0, 1)
    table = b.append("where", (test, b.const(7, "int64"), b.cast(test, "int64")), (4, 9), "int64")
    assert interval(b.nodes, table) == (0, 7)
    padded = b.append("pad", (iota,), (3, 6), "int64", lo=(0, 1), hi=(0, 0), value=-1)
    assert interval(b.nodes, padded) == (-1, 4)
    picture = b.input(1, (2, 4, 9), "float32")
    ends = {"stride": (2, 2), "lo": (0, 0), "hi": (0, 0), "dilation": (1, 1)}
    place = b.append("window_argmax", (picture,), (2, 2, 4), "int32", kernel=(2, 2), **ends)
    assert interval(b.nodes, place) == (0, 35)
    assert interval(b.nodes, b.append("sum", (iota,), (3,), "int64", axes=(1,))) == limits("int64")
