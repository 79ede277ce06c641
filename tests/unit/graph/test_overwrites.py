"""Which results may be written over an input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.overwrites import overwritable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.graph.ir import Graph

SHAPE = (6, 8)


def found(graph: Graph) -> tuple[tuple[int, int], ...]:
    fused = fuse(graph)
    return overwritable(fused, range(len(fused.kernels)))


def momentum(b: GraphBuilder) -> list[int]:
    """A step of gradient descent: the parameter, its gradient and what it keeps."""
    p, g, m = (b.input(k, SHAPE, "float32") for k in range(3))
    kept = b.pointwise("add", b.pointwise("mul", m, b.const(0.9, "float32")), g)
    return [b.pointwise("sub", p, b.pointwise("mul", kept, b.const(0.1, "float32"))), kept]


def test_a_step_of_momentum() -> None:
    b = GraphBuilder()
    graph = b.finish(momentum(b))
    # Both results over any of the three: a caller says which is a new value of which.
    assert set(found(graph)) == {(k, i) for k in range(2) for i in range(3)}


def swapped(b: GraphBuilder) -> list[int]:
    """Each is made of the other: neither may be written first."""
    p, q = (b.input(k, SHAPE, "float32") for k in range(2))
    one = b.const(1.0, "float32")
    return [b.pointwise("add", b.pointwise("mul", p, q), one), b.pointwise("sub", p, q)]


def flipped(b: GraphBuilder) -> list[int]:
    p = b.input(0, SHAPE, "float32")
    return [b.pointwise("add", p, b.append("flip", (p,), SHAPE, "float32", dims=(0,)))]


def turned(b: GraphBuilder) -> list[int]:
    p = b.input(0, (8, 8), "float32")
    return [b.pointwise("add", p, b.permute(p, (1, 0)))]


def spread(b: GraphBuilder) -> list[int]:
    """A number for every row, of which one element has the first row's place."""
    p = b.input(0, (6, 1), "float32")
    return [b.pointwise("exp", b.broadcast(p, SHAPE))]


def widened(b: GraphBuilder) -> list[int]:
    p = b.input(0, SHAPE, "bfloat16")
    return [b.pointwise("exp", b.cast(p, "float32"))]


def returned(b: GraphBuilder) -> list[int]:
    p = b.input(0, SHAPE, "float32")
    return [b.pointwise("exp", p), p]


def apart(b: GraphBuilder) -> list[int]:
    """Two kernels, of which the second reads what the first may not write over."""
    p = b.input(0, SHAPE, "float32")
    return [b.pointwise("exp", p), b.cast(b.pointwise("tanh", p), "bfloat16")]


def summed(b: GraphBuilder) -> list[int]:
    """Every row of the result waits for all of a row."""
    p = b.input(0, SHAPE, "float32")
    total = b.reduce("sum", p, (1,), keepdim=True)
    return [b.pointwise("div", p, b.broadcast(total, SHAPE))]


@pytest.mark.parametrize(
    "make", [swapped, flipped, turned, spread, widened, returned, apart, summed]
)
def test_where_it_would_be_read_later(make: Callable[[GraphBuilder], list[int]]) -> None:
    b = GraphBuilder()
    assert found(b.finish(make(b))) == ()


def test_other_kernels_do_not() -> None:
    b = GraphBuilder()
    assert overwritable(fuse(b.finish(momentum(b))), ()) == ()
