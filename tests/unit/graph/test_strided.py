"""Views as strides: every element is where the reference interpreter finds it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate
from torch_pruner.graph.strided import strided


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
