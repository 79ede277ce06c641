"""Which contractions may round float32 operands."""

from __future__ import annotations

import pytest

from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.precision import allow_tf32, is_tf32


def product(dtype: str = "float32") -> Graph:
    b = GraphBuilder()
    x, w = b.input(0, (4, 8), dtype), b.input(1, (8, 4), dtype)
    return b.finish([b.pointwise("relu", b.matmul(x, w))])


def marked(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes if is_tf32(node)]


def test_only_operators_that_were_asked_for() -> None:
    graph = product()
    assert marked(allow_tf32(graph, {"matmul"})) == ["matmul"]
    assert allow_tf32(graph, ()) is graph
    assert marked(allow_tf32(graph, {"conv"})) == []


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_types_are_left_alone(dtype: str) -> None:
    assert marked(allow_tf32(product(dtype), {"matmul"})) == []


def test_a_matrix_of_constants_is_no_product_of_torchs() -> None:
    b = GraphBuilder()
    x = b.input(0, (4, 8), "float32")
    ones = b.broadcast(b.const(1.0, "float32"), (8, 4))
    graph = b.finish([b.matmul(x, ones)])
    assert marked(allow_tf32(graph, {"matmul"})) == []


def test_it_is_another_workload_and_survives_json() -> None:
    graph = allow_tf32(product(), {"matmul"})
    assert graph.digest() != product().digest()
    assert Graph.from_json(graph.to_json()) == graph
