"""Which contractions may round float32 operands."""

from __future__ import annotations

import pytest

from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.precision import allow_fast, allow_tf32, is_fast, is_tf32


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


def layer(dtype: str = "float32") -> Graph:
    """A product, GELU's erf, a sum of exponentials and its logarithm, which stays exact."""
    b = GraphBuilder()
    total = b.matmul(b.input(0, (4, 8), dtype), b.input(1, (8, 4), dtype))
    powers = b.pointwise("exp", b.pointwise("erf", total))
    return b.finish([b.pointwise("log", b.reduce("sum", powers, [1]))])


def fast(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes if is_fast(node)]


def test_fast_math_marks_products_and_elementary_functions() -> None:
    assert fast(allow_fast(layer())) == ["matmul", "erf", "exp"]
    assert fast(allow_tf32(layer(), {"matmul"})) == []


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_fast_math_is_about_float32(dtype: str) -> None:
    graph = layer(dtype)
    assert allow_fast(graph) == graph


def test_fast_math_leaves_sums_alone_that_torch_computes_in_full() -> None:
    b = GraphBuilder()
    ones = b.broadcast(b.const(1.0, "float32"), (8, 4))
    graph = b.finish([b.matmul(b.input(0, (4, 8), "float32"), ones)])
    assert allow_fast(graph) == graph


def test_fast_math_is_another_workload_and_survives_json() -> None:
    graph = allow_fast(layer())
    assert graph.digest() != layer().digest()
    assert Graph.from_json(graph.to_json()) == graph
