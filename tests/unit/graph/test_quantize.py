"""Weights of eight bits: made, found, and read as they lie."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.unit.graph.random_graphs import assert_close, graphs, inputs_for
from torch_pruner.graph.hoist import hoist_static
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.quantize import FEW_ROWS, LEAST, keep_int8, quantize_weights
from torch_pruner.graph.reference import evaluate
from torch_pruner.graph.simplify import simplify

K, N = 96, 64


def linear(
    rows: int = 1, dtype: str = "float32", *, transposed: bool = True, static: bool = True
) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (rows, K), dtype)
    w = b.input(1, (N, K) if transposed else (K, N), dtype, static=static)
    product = b.matmul(x, b.permute(w, (1, 0)) if transposed else w)
    return simplify(b.finish([b.pointwise("relu", product)]))


def scaled(
    rows: int = 1, dtype: str = "float32", *, axis: int = 1, swap: bool = False, narrow: bool = True
) -> Graph:
    """A linear layer whose user rounded the weights; the scale varies along the other axis."""
    b = GraphBuilder()
    x, q = b.input(0, (rows, K), dtype), b.input(1, (N, K), "int8", static=True)
    s = b.input(2, (N, 1) if axis == 1 else (1, K), dtype, static=True)
    wide = b.cast(q, dtype)
    w = b.pointwise("mul", *((s, wide) if swap else (wide, s))) if narrow else wide
    return simplify(b.finish([b.matmul(x, b.permute(w, (1, 0)))]))


def product_of(graph: Graph) -> tuple[str, str]:
    (node,) = [n for n in graph.nodes if n.op == "matmul"]
    return graph.nodes[node.inputs[0]].dtype, graph.nodes[node.inputs[1]].dtype


def kept_inputs(graph: Graph) -> set[str]:
    """Dtypes of what is ready before a call and read in it."""
    users = graph.users()
    return {
        graph.nodes[i].dtype for i in graph.inputs if users[i] and graph.nodes[i].attr("static")
    }


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_rounded_by_output_channel(transposed: bool, dtype: str) -> None:
    graph = linear(dtype=dtype, transposed=transposed)
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    x = rng.standard_normal((1, K)).astype(kind)
    channels = np.exp(rng.standard_normal(N) * 3).astype(np.float32)
    w = (rng.standard_normal((K, N)) * channels).astype(kind)
    given = [x, w.T.copy() if transposed else w]
    rounded = keep_int8(quantize_weights(graph))
    assert product_of(rounded) == (dtype, "int8")
    (got,) = evaluate(rounded, given)
    wide = w.astype(np.float64)
    step = np.abs(wide).max(0) / 127
    exact = np.maximum(x.astype(np.float64) @ (np.round(wide / step) * step), 0)
    limit = 5e-3 if dtype == "bfloat16" else 1e-5
    assert np.abs(got - exact).max() / np.abs(exact).max() < limit
    hoisted = hoist_static(rounded)
    assert kept_inputs(hoisted.graph) == {"int8", "float32"}, "not the floats"


def test_a_channel_of_zeros_stays_zero_and_one_with_nan_is_nan() -> None:
    w = np.ones((N, K), np.float32)
    w[3], w[5, 0], w[7, 1] = 0, np.nan, np.inf
    (got,) = evaluate(keep_int8(quantize_weights(linear())), [np.ones((1, K), np.float32), w])
    assert got[0, 3] == 0
    assert np.isnan(got[0, [5, 7]]).all()
    assert np.isfinite(np.delete(got[0], [5, 7])).all()


def test_what_is_not_a_weight_stays() -> None:
    assert quantize_weights(linear(static=False)) == linear(static=False)
    b = GraphBuilder()
    x, w = b.input(0, (4, K), "float32"), b.input(1, (K, LEAST - 1), "float32", static=True)
    small = b.finish([b.matmul(x, w)])
    assert quantize_weights(small) == small
    b = GraphBuilder()
    x, w = (b.input(i, (K, K), "float32", static=True) for i in range(2))
    ahead = b.finish([b.matmul(x, w)])
    assert quantize_weights(ahead) == ahead, "computed once"


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_given_int8_is_read_as_it_lies(dtype: str, swap: bool) -> None:
    graph = scaled(dtype=dtype, swap=swap)
    kept = keep_int8(graph)
    assert product_of(kept) == (dtype, "int8")
    arrays = inputs_for(graph)
    assert_close(
        evaluate(kept, arrays), evaluate(graph, arrays), 2e-2 if dtype != "float32" else 1e-5
    )
    assert product_of(keep_int8(scaled(narrow=False))) == ("float32", "int8")


def test_a_device_reads_bytes_in_products_of_few_rows_alone() -> None:
    for rows, dtype in ((4, "int8"), (5, "float32")):
        assert product_of(keep_int8(scaled(rows), lambda n, *_: n <= 4)) == ("float32", dtype)


def test_a_scale_along_the_reduction_cannot_wait() -> None:
    assert product_of(keep_int8(scaled(axis=0))) == ("float32", "float32")


def test_many_rows_of_bfloat16_want_pairs() -> None:
    assert product_of(keep_int8(scaled(FEW_ROWS, "bfloat16"))) == ("bfloat16", "int8")
    assert product_of(keep_int8(scaled(FEW_ROWS + 1, "bfloat16"))) == ("bfloat16", "bfloat16")
    assert product_of(keep_int8(scaled(FEW_ROWS + 1))) == ("float32", "int8")


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(graphs(moves=14))
def test_other_graphs_compute_the_same(graph: Graph) -> None:
    arrays = inputs_for(graph)
    assert_close(evaluate(keep_int8(graph), arrays), evaluate(graph, arrays), 1e-4)
