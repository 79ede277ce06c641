"""Attention: which graphs become one kernel, and what the kernel's plan says of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from tests.emitting import signature
from tests.unit.graph.attention_graphs import Case, attention
from tests.unit.graph.random_graphs import assert_close, inputs_for, run_fused
from torch_pruner.families.attention.form import AttentionDecisions
from torch_pruner.graph.attention import attention_of, attention_plan
from torch_pruner.graph.attention_masks import hiding_mask, shared_masks
from torch_pruner.graph.describe import flops_of
from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.powers import is_at_most_one, is_beside_one
from torch_pruner.graph.reference import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable

_ONE_KERNEL = [
    Case(),
    Case(flat=True, batch=2),
    Case(kv=2, causal=True),
    Case(kv=1, flat=True),
    *(Case(mask=mask, guard=True) for mask in ("add", "row", "heads", "bool")),
    Case(dtype="float64"),
    Case(width=80),
]
POINT = {
    "vl": 16, "nv": 2, "tm": 8, "tr": 8, "nc": 2, "kb": 64, "order": 0, "pack": 1, "turned": 0,
    "tasks": 2,
}  # fmt: skip


@pytest.mark.parametrize("case", _ONE_KERNEL)
def test_is_one_kernel(case: Case) -> None:
    graph = attention(case)
    fused = fuse(graph)
    kernels = [k for k in fused.kernels if attention_of(k.spec)]
    assert len(kernels) == 1
    assert len(fused.kernels) == 1
    found = attention_of(kernels[0].spec)
    assert found is not None
    assert (found.groups, found.queries, found.keys) == (case.batch * 4, 37, 50)
    assert (found.depth, found.width) == (32, case.width)
    assert found.causal == case.causal
    arrays = inputs_for(graph)
    assert_close(run_fused(fused, arrays), evaluate(graph, arrays), 1e-4)


@pytest.mark.parametrize("case", [Case(row=True), Case(row=True, mask="bool", guard=True)])
def test_the_sum_of_a_row_may_be_read(case: Case) -> None:
    graph = attention(case)
    fused = fuse(graph)
    (kernel,) = (k for k in fused.kernels if attention_of(k.spec))
    assert len(kernel.outputs) == 2
    arrays = inputs_for(graph)
    assert_close(run_fused(fused, arrays), evaluate(graph, arrays), 1e-4)


@pytest.mark.parametrize(
    "case",
    [
        Case(seen=True),
        Case(queries=1),  # estimates decide where vectors would be padding, here against it
        Case(keys=8),
        Case(width=8),
        Case(dtype="bfloat16"),  # three kernels use tiles, which the one does not
    ],
)
def test_stays_three_kernels(case: Case) -> None:
    fused = fuse(attention(case), tiles=True)
    assert len(fused.kernels) == 3
    assert not any(attention_of(k.spec) for k in fused.kernels)


@pytest.mark.parametrize("change", ["", "guard", "infinite", "other"])
def test_powers_of_a_softmax_are_at_most_one(change: str) -> None:
    b = GraphBuilder()
    x, y = b.input(0, (4, 8), "float32"), b.input(1, (4, 8), "float32")
    top = b.reduce("max", y if change == "other" else x, (1,), keepdim=True)
    if change in ("guard", "infinite"):
        lowest = b.const(-math.inf, "float32")
        fill = b.const(0.0 if change == "guard" else -math.inf, "float32")
        top = b.pointwise("where", b.pointwise("eq", top, lowest), fill, top)
    graph = b.finish([b.pointwise("exp", b.pointwise("sub", x, top))])
    assert is_at_most_one(graph, graph.outputs[0]) == (change in ("", "guard"))


@pytest.mark.parametrize(("factor", "square"), [(-0.5, True), (0.5, True), (-0.5, False)])
def test_powers_of_a_bell_curve_are_at_most_one(factor: float, square: bool) -> None:
    b = GraphBuilder()
    x, y = b.input(0, (4, 8), "float32"), b.input(1, (4, 8), "float32")
    product = b.pointwise("mul", x, x if square else y)
    power = b.pointwise("exp", b.pointwise("mul", product, b.const(factor, "float32")))
    graph = b.finish([power])
    assert is_at_most_one(graph, graph.outputs[0]) == (factor < 0 and square)


@pytest.mark.parametrize("change", ["", "two", "read"])
def test_powers_of_a_sigmoid_are_beside_one(change: str) -> None:
    b = GraphBuilder()
    power = b.pointwise("exp", b.input(0, (4, 8), "float32"))
    total = b.pointwise("add", power, b.const(2.0 if change == "two" else 1.0, "float32"))
    graph = b.finish([total, b.pointwise("neg", power)] if change == "read" else [total])
    assert is_beside_one(graph, graph.nodes[graph.outputs[0]].inputs[0]) == (not change)


def test_long_rows_of_bfloat16_are_one_kernel() -> None:
    assert len(fuse(attention(Case(dtype="bfloat16", keys=1024)), tiles=True).kernels) == 1


def test_bfloat16_without_tiles_is_one_kernel() -> None:
    assert len(fuse(attention(Case(dtype="bfloat16"))).kernels) == 1


def _like_attention(change: str) -> Graph:
    b = GraphBuilder()
    q, k, v = (b.input(i, (2, 32, 32), "float32") for i in range(3))
    s = b.matmul(q, b.permute(k, (0, 2, 1)))
    axis = 1 if change == "axis" else 2
    if change == "transposed":
        s = b.permute(s, (0, 2, 1))
    top = b.reduce("min" if change == "op" else "max", s, (axis,), keepdim=True)
    powers = b.pointwise("exp", b.pointwise("sub", s, top))
    summed = b.pointwise("mul", powers, powers) if change == "sum" else powers
    total = b.reduce("sum", summed, (axis,), keepdim=True)
    weights = b.pointwise("div", powers, total)
    if change == "twice":
        weights = b.pointwise("add", weights, s)
    return b.finish([b.matmul(weights, weights if change == "value" else v)])


@pytest.mark.parametrize("change", ["axis", "transposed", "op", "sum", "twice", "value"])
def test_what_only_looks_like_it(change: str) -> None:
    graph = _like_attention(change)
    fused = fuse(graph)
    assert not any(attention_of(k.spec) for k in fused.kernels)
    arrays = inputs_for(graph)
    assert_close(run_fused(fused, arrays), evaluate(graph, arrays), 1e-4)


def test_causal_needs_a_mask_of_positions_alone() -> None:
    for case, causal in ((Case(causal=True), True), (Case(mask="bool", guard=True), False)):
        found = attention_of(attention(case))
        assert found is not None
        assert found.causal is causal


def test_masks_are_copied_where_heads_share_them() -> None:
    for mask, copies in (("add", 1), ("bool", 1), ("row", 0), ("heads", 0), ("", 0)):
        spec = attention(Case(mask=mask))
        found = attention_of(spec)
        assert found is not None
        assert len(shared_masks(spec, found)) == copies
        assert attention_plan(spec, found, AttentionDecisions(**{**POINT, "order": 0})).masks == ()
        scratch = signature(spec, "attention", {**POINT, "order": 1}).scratch
        hides = mask == "add"  # and then how many keys a tile sees is kept, too
        assert (hiding_mask(spec, found) is not None) == hides
        assert len(scratch) == 4 + copies + hides


@pytest.mark.parametrize(
    ("between", "hides"),
    [
        (lambda b, s: b.pointwise("mul", s, b.const(0.125, "float32")), True),
        (lambda b, s: b.pointwise("tanh", b.pointwise("div", s, b.const(50.0, "float32"))), True),
        (lambda b, s: b.cast(b.cast(s, "bfloat16"), "float32"), True),
        (lambda b, s: b.pointwise("exp", s), False),
        (lambda b, s: b.pointwise("mul", s, s), False),
        (lambda b, s: b.pointwise("mul", s, b.const(1e30, "float32")), False),
    ],
)
def test_a_mask_hides_what_is_finite(between: Callable[..., int], hides: bool) -> None:
    b = GraphBuilder()
    q, k, v = (b.input(i, (4, 32, 16), "float32") for i in range(3))
    mask = b.broadcast(b.input(3, (1, 32, 32), "float32"), (4, 32, 32))
    scores = between(b, b.matmul(q, b.permute(k, (0, 2, 1))))
    masked = b.pointwise("add", mask, scores)
    powers = b.pointwise(
        "exp", b.pointwise("sub", masked, b.reduce("max", masked, (2,), keepdim=True))
    )
    total = b.reduce("sum", powers, (2,), keepdim=True)
    spec = b.finish([b.matmul(b.pointwise("div", powers, total), v)])
    found = attention_of(spec)
    assert found is not None
    assert (hiding_mask(spec, found) is not None) == hides


def test_scratch_does_not_grow_with_heads_or_queries() -> None:
    few = signature(attention(Case(queries=64)), "attention", POINT).scratch
    many = signature(attention(Case(queries=640, heads=8, kv=8)), "attention", POINT).scratch
    assert few == many


def test_operations_of_both_products_count() -> None:
    case = Case()
    products = 2 * 4 * 37 * 50 * (32 + 32)
    assert products < flops_of(attention(case)) < 1.3 * products
