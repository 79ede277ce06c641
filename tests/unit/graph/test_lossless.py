"""Which parameters products read in a narrower dtype, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from torch_pruner.graph.hoist import hoist_static
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.lossless import CODED, narrowed, orders_of_copies
from torch_pruner.graph.reference import evaluate, numpy_dtype
from torch_pruner.graph.simplify import simplify


def tied(rows: int = 3) -> Graph:
    """An embedding, a product with weights of Linear, one of Conv1D, the embedding's weights."""
    b = GraphBuilder()
    table = b.input(0, (100, 64), "float32", static=True)
    at = b.input(1, (rows,), "int64")
    up = b.input(2, (96, 64), "float32", static=True)
    down = b.input(3, (96, 64), "float32", static=True)
    bias = b.input(4, (96,), "float32", static=True)
    x = b.append("take", (table, at), (rows, 64), "float32", dim=0)
    h = b.pointwise("relu", b.pointwise("add", b.matmul(x, b.permute(up, (1, 0))), bias))
    return b.finish([b.matmul(b.matmul(h, down), b.permute(table, (1, 0)))])


def inputs_of(graph: Graph) -> list[np.ndarray]:
    """Values that bfloat16 represents."""
    rng, arrays = np.random.default_rng(0), []
    for i in graph.inputs:
        node = graph.nodes[i]
        values = rng.standard_normal(node.shape).astype(numpy_dtype("bfloat16"))
        integers = rng.integers(0, 100, node.shape)
        arrays.append((integers if node.dtype == "int64" else values).astype(node.dtype))
    return arrays


@pytest.mark.parametrize("names", [{0, 2, 3}, {0}, {2}, {2, 4}])
def test_values_stay(names: set[int]) -> None:
    graph = tied()
    made, narrow = narrowed(graph, dict.fromkeys(names, "bfloat16"))
    assert narrow == dict.fromkeys(names - {4}, "bfloat16")
    arrays = inputs_of(graph)
    given = [a.astype(numpy_dtype(narrow[k])) if k in narrow else a for k, a in enumerate(arrays)]
    assert np.array_equal(evaluate(made, given)[0], evaluate(graph, arrays)[0])
    dtypes = [made.nodes[i].dtype for i in made.inputs]
    assert [k for k, d in enumerate(dtypes) if d == "bfloat16"] == sorted(narrow)
    assert hoist_static(simplify(made)).prepare is None, "no parameter is widened ahead"


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_what_few_rows_read_may_be_coded(rows: int) -> None:
    """It is bfloat16 that says so, all else being the same."""
    made, narrow = narrowed(tied(rows), {0: CODED, 2: "bfloat16", 3: CODED})
    plain, same = narrowed(tied(rows), dict.fromkeys((0, 2, 3), "bfloat16"))
    assert narrow == same
    coded = [k for k, i in enumerate(made.inputs) if made.nodes[i].is_coded]
    assert coded == ([0, 3] if rows <= 16 else [])
    assert (made == plain) == (rows > 16)
    assert Graph.from_json(made.to_json()) == made


def other_uses() -> dict[str, Graph]:
    b = GraphBuilder()
    w, x = b.input(0, (64, 64), "float32", static=True), b.input(1, (64, 64), "float32")
    y = b.matmul(x, w)
    rows = b.append("take", (w, b.const(1, "int64")), (64,), "float32", dim=0)
    return {
        "added": b.finish([b.pointwise("add", y, w)]),
        "returned": b.finish([y, b.permute(w, (1, 0))]),
        "on the left, too": b.finish([b.matmul(w, y), y]),
        "squared": b.finish([b.matmul(w, w)]),
        "summed": b.finish([y, b.reduce("sum", w, (0,))]),
        "not read": b.finish([x]),
        "rows alone": b.finish([rows]),
        "in float64": b.finish([b.matmul(b.cast(x, "float64"), b.cast(w, "float64"))]),
    }


@pytest.mark.parametrize("use", other_uses())
def test_other_uses_keep_float32(use: str) -> None:
    graph = other_uses()[use]
    assert narrowed(graph, {0: "bfloat16"}) == (graph, {})


def test_small_changing_and_other_parameters_stay() -> None:
    b = GraphBuilder()
    x = b.input(0, (3, 128), "float32")
    w = [b.input(1, (128, 32), "float32", static=True), b.input(2, (128, 64), "float32")]
    w += [b.input(3, (128, 64), "float64", static=True)]
    graph = b.finish([b.matmul(x, b.cast(v, "float32")) for v in w])
    assert narrowed(graph, dict.fromkeys((0, 1, 2, 3), "bfloat16")) == (graph, {})


@pytest.mark.parametrize(("rows", "turned"), [(1, True), (16, True), (17, False)])
def test_copies_lie_as_few_rows_read_them(rows: int, turned: bool) -> None:
    """Weights of Conv1D (3) are turned; those of Linear (2) and of an embedding (0) are not."""
    made, narrow = narrowed(tied(rows), dict.fromkeys((0, 2, 3), "bfloat16"))
    plain = [(0, 1), (0,), (0, 1), (0, 1), (0,)]
    expected = [*plain]
    if turned:
        expected[3] = (1, 0)
    assert orders_of_copies(made, narrow, plain) == expected
    assert orders_of_copies(made, [0, 2], plain) == plain
    lies_across = [(0, 1), (0,), (1, 0), (1, 0), (0,)]  # as its caller has the tensors
    expected = [(0, 1), (0,), (0, 1) if turned else (1, 0), (1, 0), (0,)]
    assert orders_of_copies(made, narrow, lies_across) == expected


def test_what_is_read_both_ways_is_not_turned() -> None:
    b = GraphBuilder()
    x, w = b.input(0, (1, 64), "float32"), b.input(1, (64, 64), "float32", static=True)
    made, narrow = narrowed(
        b.finish([b.matmul(b.matmul(x, w), b.permute(w, (1, 0)))]), {1: "bfloat16"}
    )
    assert narrow
    assert orders_of_copies(made, narrow, [(0, 1)] * 2) == [(0, 1)] * 2
    b = GraphBuilder()
    x, w = b.input(0, (1, 64), "float32"), b.input(1, (64, 256), "float32", static=True)
    parts = [
        b.append("slice", (w,), (64, 64), "float32", starts=(0, at), steps=(1, 1)) for at in (0, 64)
    ]
    made, narrow = narrowed(b.finish([b.matmul(x, p) for p in parts]), {1: "bfloat16"})
    assert orders_of_copies(made, narrow, [(0, 1)] * 2) == [(0, 1), (1, 0)]
    assert orders_of_copies(made, narrow, [(0, 1), (1, 0)]) == [(0, 1), (1, 0)]
