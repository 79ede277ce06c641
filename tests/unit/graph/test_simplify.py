"""Simplification: each rule's effect, and that values do not change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.graph.random_graphs import assert_close, graphs, inputs_for
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.ops import FLOATS, OpKind
from torch_pruner.graph.reference import evaluate, numpy_dtype
from torch_pruner.graph.simplify import simplify

if TYPE_CHECKING:
    from collections.abc import Callable

SPECIAL = (0.0, -0.0, 1.0, -1.5, 2.5, 1e-30, 3e38, math.inf, -math.inf, math.nan, 7.0, -8.0)


def special_inputs(graph: Graph) -> list[np.ndarray]:
    """Every special float; small integers of both signs."""
    found = []
    for i in graph.inputs:
        node = graph.nodes[i]
        values = np.resize(np.array(SPECIAL), node.numel)
        if node.dtype not in FLOATS:
            values = np.resize(np.arange(-3, 4), node.numel)
        with np.errstate(all="ignore"):
            found.append(values.astype(numpy_dtype(node.dtype)).reshape(node.shape))
    return found


def check(build: Callable[[GraphBuilder], int]) -> Graph:
    """The simplified graph of one output, which agrees with the original on special values."""
    b = GraphBuilder()
    graph = b.finish([build(b)])
    simple = simplify(graph)
    assert simplify(simple) == simple
    inputs = special_inputs(graph)
    for got, wanted in zip(evaluate(simple, inputs), evaluate(graph, inputs), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    return simple


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes if n.op != "input"]


def x(
    b: GraphBuilder, shape: tuple[int, ...] = (3, 4), dtype: str = "float32", index: int = 0
) -> int:
    return b.input(index, shape, dtype)


def work(graph: Graph) -> int:
    """Elements that pointwise operators and reductions compute."""
    kinds = (OpKind.POINTWISE, OpKind.REDUCE)
    return sum(n.numel for n in graph.nodes if n.kind in kinds)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(), st.integers(0, 100))
def test_random_graphs_keep_their_values(graph, seed):
    simple = simplify(graph)
    assert work(simple) <= work(graph)
    assert [simple.nodes[i] for i in simple.inputs] == [graph.nodes[i] for i in graph.inputs]
    arrays = inputs_for(graph, seed)
    assert_close(evaluate(simple, arrays), evaluate(graph, arrays), 1e-5)
    assert simplify(simple) == simple


@pytest.mark.parametrize(
    ("op", "value"), [("add", -0.0), ("sub", 0), ("mul", 1), ("div", 1), ("pow", 1)]
)
def test_neutral_constant_on_the_right(op, value):
    assert ops(check(lambda b: b.pointwise(op, x(b), b.const(value, "float32")))) == []


@pytest.mark.parametrize(("op", "value"), [("add", -0.0), ("mul", 1)])
def test_neutral_constant_on_the_left(op, value):
    assert ops(check(lambda b: b.pointwise(op, b.const(value, "float32"), x(b)))) == []


@pytest.mark.parametrize(("op", "value"), [("sub", 0), ("div", 1), ("mul", 0), ("pow", 0)])
def test_constants_that_are_not_neutral(op, value):
    def build(b: GraphBuilder) -> int:
        constant = b.const(value, "float32")
        operands = (x(b), constant) if op in ("mul", "pow") else (constant, x(b))
        return b.pointwise(op, *operands)

    assert op in ops(check(build))


def test_a_neutral_tensor_of_constants():
    def build(b: GraphBuilder) -> int:
        ones = b.reshape(b.broadcast(b.const(1, "float32"), (4, 3)), (12,))
        return b.pointwise("mul", x(b, (12,)), ones)

    assert ops(check(build)) == []


def test_masks_of_constants():
    def build(b: GraphBuilder) -> int:
        everything = b.broadcast(b.const(True, "bool"), (3, 4))
        mask = b.pointwise("logical_and", everything, x(b, dtype="bool"))
        return b.pointwise("logical_or", mask, b.pointwise("logical_not", everything))

    assert ops(check(build)) == []


@pytest.mark.parametrize("divisor", [8.0, -0.5, 2.0**-100])
def test_division_by_a_power_of_two_is_a_product(divisor):
    graph = check(lambda b: b.pointwise("div", x(b), b.const(divisor, "float32")))
    assert ops(graph) == ["const", "mul"]


@pytest.mark.parametrize("divisor", [3.0, 0.0, math.inf, 2.0**127])
def test_other_divisions_stay(divisor):
    graph = check(lambda b: b.pointwise("div", x(b), b.const(divisor, "float32")))
    assert ops(graph) == ["const", "div"]


@pytest.mark.parametrize("op", ["neg", "bitwise_not"])
def test_involutions(op):
    dtype = "float32" if op == "neg" else "int32"
    graph = check(lambda b: b.pointwise(op, b.pointwise(op, x(b, dtype=dtype))))
    assert ops(graph) == []


@pytest.mark.parametrize("op", ["relu", "abs", "floor", "sign"])
def test_idempotent_operators(op):
    assert ops(check(lambda b: b.pointwise(op, b.pointwise(op, x(b))))) == [op]


def test_logical_not_twice_of_a_number_is_no_identity():
    def build(b: GraphBuilder) -> int:
        once = b.pointwise("logical_not", x(b), dtype="bool")
        return b.pointwise("logical_not", once)

    assert ops(check(build)) == ["logical_not", "logical_not"]


def test_difference_of_the_same_value_stays():
    """Infinity less infinity is NaN."""
    assert ops(check(lambda b: b.pointwise("sub", x(b), x(b)))) == ["sub"]


def test_constants_fold_in_their_dtype():
    def build(b: GraphBuilder) -> int:
        third = b.pointwise("div", b.const(1, "float32"), b.const(3, "float32"))
        return b.pointwise("mul", x(b), b.pointwise("exp", b.pointwise("neg", third)))

    graph = check(build)
    assert ops(graph) == ["const", "mul"]
    value = graph.nodes[graph.nodes[-1].inputs[1]].attr("value")
    assert value == np.float32(value)


@pytest.mark.parametrize(
    ("source", "between", "target", "dropped"),
    [
        ("bfloat16", "float32", "bfloat16", True),
        ("float16", "float32", "float64", True),
        ("int32", "float64", "int32", True),
        ("bool", "int64", "float32", True),
        ("int8", "int64", "uint8", True),
        ("float32", "bfloat16", "float32", False),
        ("float32", "int32", "float32", False),
        ("int32", "float32", "int32", False),
        ("int32", "float64", "int8", False),
        ("int32", "bool", "int32", False),
        ("float16", "bfloat16", "float32", False),
    ],
)
def test_casts_compose_when_nothing_is_lost(source, between, target, dropped):
    def build(b: GraphBuilder) -> int:
        inner = b.append("cast", (b.input(0, (3, 4), source),), (3, 4), between)
        return b.append("cast", (inner,), (3, 4), target)

    b = GraphBuilder()
    graph = simplify(b.finish([build(b)]))
    casts = 2 if not dropped else int(source != target)
    assert ops(graph) == ["cast"] * casts


@pytest.mark.parametrize("condition", [True, False])
def test_where_of_a_constant(condition):
    def build(b: GraphBuilder) -> int:
        mask = b.broadcast(b.const(condition, "bool"), (3, 4))
        return b.pointwise("where", mask, x(b), x(b, index=1))

    assert ops(check(build)) == []


def test_work_on_repeated_values_is_done_once():
    def build(b: GraphBuilder) -> int:
        scale = b.broadcast(x(b, (4,)), (5, 3, 4))
        shift = b.broadcast(x(b, (1, 4), index=1), (5, 3, 4))
        inverse = b.pointwise("rsqrt", b.pointwise("add", scale, shift))
        return b.pointwise("mul", inverse, x(b, (5, 3, 4), index=2))

    graph = check(build)
    assert [n.shape for n in graph.nodes if n.op in ("add", "rsqrt")] == [(1, 4), (1, 4)]


def test_scalars_are_not_broadcast():
    def build(b: GraphBuilder) -> int:
        return b.append("add", (x(b), b.broadcast(x(b, (), index=1), (3, 4))), (3, 4), "float32")

    assert ops(check(build)) == ["add"]


@pytest.mark.parametrize(
    "view",
    [
        lambda b, v: b.reshape(v, (4, 3)),
        lambda b, v: b.permute(v, (1, 0)),
        lambda b, v: b.broadcast(v, (2, 3, 4)),
        lambda b, v: b.slice(v, (1, 1), (2, 2), (1, 2)),
        lambda b, v: b.append("flip", (v,), (3, 4), "float32", dims=(1,)),
    ],
)
def test_views_of_a_repeated_constant(view):
    graph = check(lambda b: view(b, b.broadcast(b.const(2, "float32"), (3, 4))))
    assert ops(graph) == ["const", "broadcast"]


def test_views_compose():
    def build(b: GraphBuilder) -> int:
        v = b.slice(x(b, (9, 8)), (1, 0), (4, 8), (2, 1))
        v = b.slice(v, (1, 2), (2, 3), (2, 2))
        v = b.append("flip", (v,), (2, 3), "float32", dims=(0, 1))
        return b.append("flip", (v,), (2, 3), "float32", dims=(1,))

    assert ops(check(build)) == ["slice", "flip"]


def test_views_that_cancel():
    def build(b: GraphBuilder) -> int:
        v = b.append("permute", (x(b),), (4, 3), "float32", perm=(1, 0))
        v = b.append("permute", (v,), (3, 4), "float32", perm=(1, 0))
        v = b.append("reshape", (v,), (12,), "float32")
        v = b.append(
            "flip", (b.append("reshape", (v,), (3, 4), "float32"),), (3, 4), "float32", dims=()
        )
        return b.append("slice", (v,), (3, 4), "float32", starts=(0, 0), steps=(1, 1))

    assert ops(check(build)) == []


def test_permuting_dimensions_of_extent_one_is_a_reshape():
    graph = check(lambda b: b.permute(x(b, (3, 1, 4)), (1, 0, 2)))
    assert ops(graph) == ["reshape"]


def test_permute_and_slice_move_inside_broadcasts():
    def build(b: GraphBuilder) -> int:
        v = b.permute(b.broadcast(x(b, (3, 1)), (2, 3, 4)), (2, 0, 1))
        return b.slice(v, (1, 0, 1), (2, 1, 2))

    assert ops(check(build))[-1] == "broadcast"


def test_pads():
    def build(b: GraphBuilder) -> int:
        v = b.append("pad", (x(b),), (3, 4), "float32", lo=(0, 0), hi=(0, 0), value=0.0)
        v = b.append("pad", (v,), (4, 5), "float32", lo=(1, 0), hi=(0, 1), value=0.0)
        return b.append("pad", (v,), (6, 5), "float32", lo=(1, 0), hi=(1, 0), value=0.0)

    graph = check(build)
    assert ops(graph) == ["pad"]
    assert graph.nodes[-1].attr("lo") == (2, 0)


@pytest.mark.parametrize(("value", "lo", "apart"), [(0, 1, False), (0, 0, False), (1, 1, True)])
def test_zeros_around_an_image_are_padding_of_its_convolution(value, lo, apart):
    def build(b: GraphBuilder) -> int:
        x, w = b.input(0, (1, 4, 6, 5), "float32"), b.input(1, (8, 2, 3, 3), "float32")
        around = {"lo": (0, 0, lo, 0), "hi": (0, 0, 2, 1), "value": value}
        padded = b.append("pad", (x,), (1, 4, 8 + lo, 6), "float32", **around)
        settings = {"stride": (2, 2), "lo": (0, 1), "hi": (0, 1), "dilation": (1, 1), "groups": 2}
        return b.append("conv", (padded, w), (1, 8, (5 + lo) // 2 + 1, 3), "float32", **settings)

    graph = check(build)
    assert any(n.op == "pad" for n in graph.nodes) == apart
    conv = graph.nodes[graph.outputs[0]]
    assert conv.attr("lo") == ((0, 1) if apart else (lo, 1))
    assert conv.attr("hi") == ((0, 1) if apart else (2, 2))


def test_concatenation_of_neighbouring_slices():
    def build(b: GraphBuilder) -> int:
        v = x(b, (8, 3))
        parts = [b.slice(v, (s, 0), (n, 3)) for s, n in ((1, 2), (3, 4), (0, 1))]
        return b.append("cat", parts, (7, 3), "float32", dim=0)

    assert ops(check(build)) == ["slice", "slice", "cat"]


def test_chunks_of_a_concatenation():
    def build(b: GraphBuilder) -> int:
        both = b.append("cat", (x(b), x(b, (2, 4), index=1)), (5, 4), "float32", dim=0)
        return b.slice(both, (3, 0), (2, 4))

    assert ops(check(build)) == []


@pytest.mark.parametrize("negated", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_turned_halves_are_a_view(dim, negated):
    def build(b: GraphBuilder) -> int:
        whole = x(b, (4, 6, 8))
        half = tuple(d // 2 if i == dim else d for i, d in enumerate((4, 6, 8)))
        parts = [
            b.slice(whole, [half[dim] if i == dim and first else 0 for i in range(3)], half)
            for first in (True, False)
        ]
        parts = [b.pointwise("neg", p) if k in negated else p for k, p in enumerate(parts)]
        return b.append("cat", parts, (4, 6, 8), "float32", dim=dim)

    found = ops(check(build))
    assert "flip" in found
    assert "cat" not in found


def test_halves_of_unequal_size_or_of_two_values_are_copied():
    def uneven(b: GraphBuilder) -> int:
        parts = (b.slice(x(b, (3, 4)), (0, 3), (3, 1)), b.slice(x(b, (3, 4)), (0, 0), (3, 3)))
        return b.append("cat", parts, (3, 4), "float32", dim=1)

    def strangers(b: GraphBuilder) -> int:
        left, right = x(b, (3, 4)), x(b, (3, 4), index=1)
        parts = (b.slice(left, (0, 2), (3, 2)), b.slice(right, (0, 0), (3, 2)))
        return b.append("cat", parts, (3, 4), "float32", dim=1)

    assert ops(check(uneven))[-1] == ops(check(strangers))[-1] == "cat"


def test_repetition_is_a_view():
    def build(b: GraphBuilder) -> int:
        value = b.pointwise("neg", x(b, (3, 4)))
        return b.append("cat", (value, value, value), (3, 12), "float32", dim=1)

    assert "cat" not in ops(check(build))


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_reductions_over_extents_of_one(op):
    assert ops(check(lambda b: b.reduce(op, x(b, (3, 1, 4)), (1,)))) == ["reshape"]
    graph = check(lambda b: b.reduce(op, x(b, (3, 1, 4)), (1, 2)))
    assert ops(graph) == ["reshape", op]
    assert graph.nodes[-1].attr("axes") == (1,)


def test_argmax_over_an_extent_of_one():
    graph = check(lambda b: b.append("argmax", (x(b, (3, 1)),), (3,), "int64", axes=(1,)))
    assert ops(graph) == ["const", "broadcast"]


def test_dead_code_goes_and_inputs_stay():
    b = GraphBuilder()
    b.pointwise("exp", x(b, index=1))
    graph = simplify(b.finish([x(b)]))
    assert ops(graph) == []
    assert [graph.nodes[i].attr("index") for i in graph.inputs] == [0, 1]


def test_concatenations_of_concatenations_are_one() -> None:
    b = GraphBuilder()
    x, y, z = (b.input(i, (2, 3), "float32") for i in range(3))
    once = b.append("cat", (x, y), (2, 6), "float32", dim=1)
    twice = b.append("cat", (once, z), (2, 9), "float32", dim=1)
    across = b.append("cat", (twice, b.input(3, (2, 9), "float32")), (4, 9), "float32", dim=0)
    graph = simplify(b.finish([across]))
    parts = [len(n.inputs) for n in graph.nodes if n.op == "cat"]
    assert sorted(parts) == [2, 3]
