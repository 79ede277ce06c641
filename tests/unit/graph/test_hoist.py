"""Hoisting: what depends on parameters alone is computed ahead, and nothing else changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings

from tests.unit.graph.random_graphs import assert_close, graphs, inputs_for
from torch_pruner.graph.hoist import Hoisted, hoist_static
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.reference import evaluate

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


def run(hoisted: Hoisted, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    ahead: list[np.ndarray] = []
    if hoisted.prepare is not None:
        ahead = evaluate(hoisted.prepare, [arrays[i] for i in hoisted.sources])
    return evaluate(hoisted.graph, [*arrays, *ahead])


def operators(graph: Graph | None) -> list[str]:
    return [] if graph is None else [n.op for n in graph.nodes if n.kind is not OpKind.LEAF]


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(graphs(moves=14))
def test_prepared_and_rest_compute_the_graph(graph: Graph) -> None:
    hoisted = hoist_static(graph)
    arrays = inputs_for(graph)
    assert_close(run(hoisted, arrays), evaluate(graph, arrays), 1e-4)
    n = len(graph.inputs)
    before = [graph.nodes[i] for i in graph.inputs]
    after = [hoisted.graph.nodes[i] for i in hoisted.graph.inputs]
    assert after[:n] == before, "inputs keep their indices"
    assert all(node.attr("static") for node in after[n:])
    assert all(graph.nodes[graph.inputs[i]].attr("static") for i in hoisted.sources)
    again = hoist_static(hoisted.graph)
    assert again.prepare is None, "nothing static is left"


def _scaled(b: GraphBuilder, w: int) -> int:
    return b.pointwise("mul", w, b.const(2.0, "float32"))


def test_computed_weights_are_hoisted() -> None:
    b = GraphBuilder()
    x = b.input(0, (4, 8), "float32")
    w = b.input(1, (8, 8), "float32", static=True)
    hoisted = hoist_static(b.finish([b.matmul(x, b.permute(_scaled(b, w), (1, 0)))]))
    assert operators(hoisted.prepare) == ["mul"]
    assert operators(hoisted.graph) == ["permute", "matmul"]
    assert hoisted.sources == (1,)


def test_views_are_not() -> None:
    b = GraphBuilder()
    x = b.input(0, (4, 8), "float32")
    w = b.input(1, (8, 8), "float32", static=True)
    graph = b.finish([b.matmul(x, b.permute(w, (1, 0)))])
    assert hoist_static(graph) == Hoisted(graph, None, ())


@pytest.mark.parametrize("op", ["mul", "matmul"])
def test_a_parameter_in_a_wider_type_is_read_narrow(op: str) -> None:
    """By elementwise readers: a product would widen it again and again."""
    b = GraphBuilder()
    x = b.input(0, (8, 8), "float32")
    w = b.cast(b.permute(b.input(1, (8, 8), "bfloat16", static=True), (1, 0)), "float32")
    y = b.matmul(x, w) if op == "matmul" else b.pointwise(op, x, w)
    graph = b.finish([y])
    hoisted = hoist_static(graph)
    assert (hoisted == Hoisted(graph, None, ())) == (op == "mul")


def test_a_value_may_not_grow_much() -> None:
    """A mask computed from one row and broadcast to a large one is cheaper made than read."""
    for copies, hoisted_ops in ((4, ["broadcast", "add"]), (5, [])):
        b = GraphBuilder()
        w = b.input(0, (16,), "float32", static=True)
        x = b.input(1, (copies, 16), "float32")
        grown = b.pointwise("add", b.broadcast(w, (copies, 16)), b.const(1.0, "float32"))
        hoisted = hoist_static(b.finish([b.pointwise("mul", grown, x)]))
        assert operators(hoisted.prepare) == hoisted_ops


def test_what_only_inputs_give_stays() -> None:
    b = GraphBuilder()
    x = b.input(0, (4,), "float32")
    graph = b.finish([b.pointwise("neg", x), b.pointwise("exp", b.const(1.0, "float32"))])
    assert hoist_static(graph).prepare is None


def test_a_static_output_is_hoisted_and_handed_through() -> None:
    b = GraphBuilder()
    w = b.input(0, (4,), "float32", static=True)
    hoisted = hoist_static(b.finish([_scaled(b, w)]))
    assert operators(hoisted.graph) == []
    assert hoisted.graph.outputs == hoisted.graph.inputs[1:]


def test_what_is_looked_up_is_hoisted_though_it_grows() -> None:
    b = GraphBuilder()
    table = b.input(0, (4, 2), "float32", static=True)
    rows = b.input(1, (64,), "int64", static=True)
    x = b.input(2, (64, 2), "float32")
    found = b.append("take", (table, rows), (64, 2), "float32", dim=0)
    hoisted = hoist_static(b.finish([b.pointwise("add", x, found)]))
    assert operators(hoisted.prepare) == ["take"]
