"""Elementwise kernels computed in the order of axes in which their results are stored."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.graph.random_graphs import graphs, inputs_for
from torch_pruner.graph._in_stored_order import in_stored_order
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.reference import evaluate

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def test_permutations_that_undo_each_other_are_gone() -> None:
    b = GraphBuilder()
    x = b.permute(b.input(0, (2, 5, 6, 4), "float32"), FIRST)
    spec = in_stored_order(b.finish([b.permute(b.pointwise("relu", x), LAST)]))
    assert [node.op for node in spec.nodes] == ["input", "relu"]
    assert spec.nodes[-1].shape == (2, 5, 6, 4)


def test_what_lies_across_is_read_through_a_permutation() -> None:
    b = GraphBuilder()
    x, y = b.permute(b.input(0, (3, 4), "float32"), (1, 0)), b.input(1, (4, 3), "float32")
    spec = in_stored_order(b.finish([b.permute(b.pointwise("add", x, y), (1, 0))]))
    assert [node.op for node in spec.nodes] == ["input", "input", "permute", "add"]
    assert spec.nodes[spec.outputs[0]].inputs == (0, 2)


def test_a_value_stored_in_two_orders_is_computed_once() -> None:
    b = GraphBuilder()
    value = b.pointwise("exp", b.input(0, (3, 4), "float32"))
    spec = b.finish([value, b.permute(value, (1, 0))])
    assert in_stored_order(spec) == spec


def test_reductions_are_left_alone() -> None:
    b = GraphBuilder()
    x = b.input(0, (3, 4, 5), "float32")
    total = b.pointwise("relu", b.reduce("sum", x, (2,)))
    spec = b.finish([b.permute(total, (1, 0))])
    assert in_stored_order(spec) == spec


@given(graphs(), st.data())
def test_values_are_the_same(graph: Graph, data: st.DataObject) -> None:
    outputs = [o for o in graph.outputs if graph.nodes[o].kind is OpKind.POINTWISE]
    b = GraphBuilder()
    new: list[int] = []
    for node in graph.nodes:
        new.append(b.again(node, (new[i] for i in node.inputs)))
    ends = []
    for o in outputs or graph.outputs[:1]:
        rank = len(graph.nodes[o].shape)
        ends.append(b.permute(new[o], data.draw(st.permutations(range(rank)))))
    spec = b.finish(ends)
    arrays = inputs_for(spec)
    for got, wanted in zip(
        evaluate(in_stored_order(spec), arrays), evaluate(spec, arrays), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)
