"""Views as strides: every element is where the reference interpreter finds it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from torch_pruner.graph.adjacency import packs_in_squares
from torch_pruner.graph.contraction import contraction_of
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate
from torch_pruner.graph.strided import matrix_strides, reads_apart, strided


def heads() -> Graph:
    b = GraphBuilder()
    x = b.slice(b.input(0, (2, 5, 24), "int64"), (0, 0, 12), (2, 5, 12))
    return b.finish([b.permute(b.reshape(x, (2, 5, 3, 4)), (0, 2, 1, 3))])


def merged() -> Graph:
    b = GraphBuilder()
    x = b.reshape(b.input(0, (2, 3, 4), "int64"), (6, 4))
    return b.finish([b.reshape(x, (1, 6, 2, 1, 2))])


def stepped() -> Graph:
    b = GraphBuilder()
    return b.finish([b.slice(b.input(0, (7, 6), "int64"), (1, 0), (3, 3), (2, 2))])


def spread() -> Graph:
    b = GraphBuilder()
    x = b.input(0, (3, 1, 4), "int64")
    return b.finish([b.append("broadcast", (x,), (2, 3, 5, 4), "int64")])


def scalar() -> Graph:
    b = GraphBuilder()
    return b.finish([b.reshape(b.input(0, (1, 1), "int64"), ())])


@pytest.mark.parametrize("make", [heads, merged, stepped, spread, scalar])
def test_elements_are_where_the_strides_say(make) -> None:
    graph = make()
    (at,) = graph.outputs
    source = np.arange(graph.nodes[graph.inputs[0]].numel)
    values = evaluate(graph, [source.reshape(graph.nodes[graph.inputs[0]].shape)])[0]
    place = strided(graph, at)
    assert place is not None
    assert place.source == graph.inputs[0]
    for index in itertools.product(*(range(d) for d in values.shape)):
        where = place.offset + sum(i * s for i, s in zip(index, place.strides, strict=True))
        assert source[where] == values[index], index


def test_what_no_strides_describe() -> None:
    b = GraphBuilder()
    x = b.input(0, (4, 6), "int64")
    turned = b.reshape(b.permute(x, (1, 0)), (24,))
    computed = b.pointwise("neg", x)
    graph = b.finish([turned, computed, b.permute(computed, (1, 0))])
    assert [strided(graph, o) for o in graph.outputs] == [None] * 3


def chunks() -> Graph:
    """Heads and chunks of a sequence in one axis, which has no stride; the others have."""
    b = GraphBuilder()
    x = b.reshape(b.input(0, (6, 3, 4), "int64"), (2, 3, 3, 4))
    return b.finish([b.reshape(b.permute(x, (2, 0, 1, 3)), (6, 3, 4))])


def inner_half() -> Graph:
    """Columns that are the inner part of an axis whose outer part was merged with another."""
    b = GraphBuilder()
    x = b.permute(b.input(0, (3, 5, 8), "int64"), (1, 0, 2))
    return b.finish([b.reshape(x, (5, 6, 4))])


@pytest.mark.parametrize("make", [heads, merged, chunks, inner_half, spread])
def test_the_last_two_axes_lie_as_their_strides_say_whatever_the_others_do(make) -> None:
    graph = make()
    source = np.arange(graph.nodes[graph.inputs[0]].numel)
    values = evaluate(graph, [source.reshape(graph.nodes[graph.inputs[0]].shape)])[0]
    found = matrix_strides(graph, graph.outputs[0])
    if make is inner_half:  # rows of two former axes
        assert found is None
        return
    assert found is not None
    rows, columns = values.shape[-2:]
    expected = np.arange(rows)[:, None] * found[0] + np.arange(columns) * found[1]
    for matrix in values.reshape(-1, rows, columns):
        assert (matrix - matrix[0, 0] == expected).all()


@pytest.mark.parametrize(
    ("depth", "turned", "expected"), [(16, True, True), (15, True, False), (16, False, False)]
)
def test_weights_whose_columns_lie_apart_are_packed_in_squares(
    depth: int, turned: bool, expected: bool
) -> None:
    b = GraphBuilder()
    x = b.input(0, (4, depth), "float32")
    w = b.input(1, (24, depth) if turned else (depth, 24), "float32")
    graph = b.finish([b.matmul(x, b.permute(w, (1, 0)) if turned else w)])
    assert packs_in_squares(graph, contraction_of(graph), 16) is expected


def _turned(b: GraphBuilder, x: int) -> int:
    return b.pointwise("relu", b.permute(x, (0, 2, 1)))


def _scaled(b: GraphBuilder, x: int) -> int:
    """A factor of each line, which all of its elements read."""
    return b.pointwise("mul", x, b.broadcast(b.input(1, (4, 32, 1), "float32"), (4, 32, 48)))


def _padded(b: GraphBuilder, x: int) -> int:
    return b.append("pad", (x,), (4, 34, 48), "float32", lo=(0, 1, 0), hi=(0, 1, 0), value=0.0)


def _phases(b: GraphBuilder, x: int) -> int:
    """Two sums of lines that take turns in the result, each from a place of its own."""
    halves = [b.slice(x, (0, 0, k), (4, 32, 24)) for k in (0, 24)]
    both = [b.reshape(b.pointwise("neg", half), (4, 32, 24)) for half in halves]
    total = b.pointwise("add", *both)
    turns = b.reshape(total, (4, 2, 16, 24))
    return b.reshape(b.permute(turns, (0, 2, 3, 1)), (4, 16, 48))


@pytest.mark.parametrize(
    ("make", "apart"),
    [(_turned, 1), (_scaled, 0), (_padded, 0), (_phases, 2)],
    ids=["turned", "a factor of a line", "padded", "in turns"],
)
def test_reads_of_neighbours_that_lie_apart_are_counted(make, apart: int) -> None:
    b = GraphBuilder()
    x = b.input(0, (4, 32, 48), "float32")
    assert reads_apart(b.finish([make(b, x)]), 16) == apart


def test_of_little_nothing_is_counted() -> None:
    b = GraphBuilder()
    x = b.input(0, (3, 4), "float32")
    assert reads_apart(b.finish([b.permute(x, (1, 0))]), 16) == 0


def test_padding_around_nothing_reads_nothing() -> None:
    b = GraphBuilder()
    x = b.slice(b.input(0, (40, 1), "float32"), (0, 0), (40, 0))
    wide = b.append("pad", (x,), (40, 1), "float32", lo=(0, 0), hi=(0, 1), value=0.5)
    assert reads_apart(b.finish([b.pointwise("neg", wide)]), 16) == 0


def test_one_place_for_every_lane_is_not_apart() -> None:
    b = GraphBuilder()
    x = b.pointwise("neg", b.input(0, (1, 1), "float32"))
    wide = b.append("broadcast", (b.reshape(x, ()),), (4, 32), "float32")
    assert reads_apart(b.finish([b.pointwise("neg", wide)]), 16) == 0
