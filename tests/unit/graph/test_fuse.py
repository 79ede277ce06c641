"""Fusion: kernels compute what the graph computes, in an order that works, each in a known form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.emitting import signature
from tests.unit.graph.random_graphs import assert_close, graphs, inputs_for, orders, run_fused
from torch_pruner.families import sketches_for
from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.fuse import FusedGraph, fuse
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.layout import channels_last, identity
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.reference import evaluate
from torch_pruner.graph.rows import row_domain
from torch_pruner.graph.simplify import simplify
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

_MANY = settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@_MANY
@given(graphs())
def test_kernels_compute_the_graph(graph: Graph) -> None:
    arrays = inputs_for(graph)
    assert_close(run_fused(fuse(graph), arrays), evaluate(graph, arrays), 1e-4)


@_MANY
@given(st.data())
def test_kernels_keep_the_orders_that_callers_demand(data) -> None:
    graph = data.draw(graphs())
    fixed = data.draw(orders(graph))
    arrays = inputs_for(graph)
    fused = fuse(graph, fixed)
    for node in (*graph.inputs, *graph.outputs):
        assert fused.orders[node] == fixed.get(node, identity(len(graph.nodes[node].shape)))
    assert_close(run_fused(fused, arrays), evaluate(graph, arrays), 1e-4)


@_MANY
@given(graphs(moves=14))
def test_what_holds_of_every_cut(graph: Graph) -> None:
    fused = fuse(graph)
    written = set(graph.inputs)
    for kernel in fused.kernels:
        assert set(kernel.inputs) <= written, "a kernel reads what no earlier one wrote"
        assert not set(kernel.outputs) & written, "two kernels write one buffer"
        written.update(kernel.outputs)
        kinds = [n.kind for n in kernel.spec.nodes]
        if attention_of(kernel.spec) is not None:
            kinds = []
        assert kinds.count(OpKind.CONTRACT) <= 1
        if OpKind.REDUCE in kinds:
            assert OpKind.CONTRACT not in kinds
            row_domain(kernel.spec)
        assert len(kernel.spec.inputs) == len(kernel.inputs)
        for node, buffer in zip(
            (*kernel.inputs, *kernel.outputs),
            (*kernel.spec.inputs, *kernel.spec.outputs),
            strict=True,
        ):
            there = tuple(graph.nodes[node].shape[k] for k in fused.orders[node])
            assert kernel.spec.nodes[buffer].shape == there
    assert set(graph.outputs) <= written


@_MANY
@given(graphs(moves=14))
def test_every_kernel_can_be_expressed(graph: Graph) -> None:
    for kernel in fuse(graph).kernels:
        sketches = sketches_for(Task("kernel", kernel.spec, TargetSpec.detect(2), 2))
        assert sketches
        for sketch in sketches:
            point = sketch.default()
            assert sketch.valid(point[None]).all()
            signature(kernel.spec, sketch.name, sketch.named(point))


@_MANY
@given(graphs())
def test_the_same_graph_is_cut_the_same_way(graph: Graph) -> None:
    assert fuse(graph) == fuse(Graph.from_json(graph.to_json()))


def encoder(layers: int, *, width: int = 12, heads: int = 3, length: int = 7) -> Graph:
    """A BERT-like encoder: attention, residuals, layer norms, GELU."""
    b = GraphBuilder()
    n_inputs = 0

    def fresh(*shape: int, static: bool = True) -> int:
        nonlocal n_inputs
        n_inputs += 1
        return b.input(n_inputs - 1, shape, "float32", static=static)

    def linear(x: int, out: int) -> int:
        depth = b.shape(x)[-1]
        weight = b.permute(fresh(out, depth), (1, 0))
        product = b.matmul(b.reshape(x, (length, depth)), weight)
        return b.reshape(b.pointwise("add", product, fresh(out)), (1, length, out))

    def norm(x: int) -> int:
        share = b.const(1 / width, "float32")
        mean = b.pointwise("mul", b.reduce("sum", x, (2,), keepdim=True), share)
        centred = b.pointwise("sub", x, mean)
        square = b.pointwise("mul", centred, centred)
        var = b.pointwise("mul", b.reduce("sum", square, (2,), keepdim=True), share)
        inv = b.pointwise("rsqrt", b.pointwise("add", var, b.const(1e-5, "float32")))
        scaled = b.pointwise("mul", b.pointwise("mul", centred, inv), fresh(width))
        return b.pointwise("add", scaled, fresh(width))

    def split(x: int) -> int:
        return b.permute(b.reshape(x, (1, length, heads, width // heads)), (0, 2, 1, 3))

    def attention(x: int) -> int:
        q, k, v = (split(linear(x, width)) for _ in range(3))
        scores = b.matmul(q, b.permute(k, (0, 1, 3, 2)))
        scores = b.pointwise("mul", scores, b.const(0.5, "float32"))
        e = b.pointwise(
            "exp", b.pointwise("sub", scores, b.reduce("max", scores, (3,), keepdim=True))
        )
        weights = b.pointwise("div", e, b.reduce("sum", e, (3,), keepdim=True))
        mixed = b.permute(b.matmul(weights, v), (0, 2, 1, 3))
        return linear(b.reshape(mixed, (1, length, width)), width)

    def gelu(x: int) -> int:
        half = b.pointwise("mul", x, b.const(0.5, "float32"))
        erf = b.pointwise("erf", b.pointwise("mul", x, b.const(0.70710678, "float32")))
        return b.pointwise("mul", half, b.pointwise("add", erf, b.const(1.0, "float32")))

    x = fresh(1, length, width, static=False)
    for _ in range(layers):
        x = norm(b.pointwise("add", x, attention(x)))
        x = norm(b.pointwise("add", x, linear(gelu(linear(x, 2 * width)), width)))
    return b.finish([x])


def _digests(fused: FusedGraph) -> list[str]:
    return [k.spec.digest() for k in fused.kernels]


def test_equal_layers_are_equal_kernels() -> None:
    two, three, six = (_digests(fuse(encoder(n))) for n in (2, 3, 6))
    assert set(two) == set(three) == set(six)
    assert len(six) - len(three) == 3 * (len(three) - len(two))
    assert len(three) - len(two) == 11  # projections 4, scores, softmax, mix, norms 2, linear 2


def test_encoder_computes_the_graph() -> None:
    graph = encoder(2)
    arrays = inputs_for(graph)
    assert_close(run_fused(fuse(graph), arrays), evaluate(graph, arrays), 1e-4)


def test_softmax_and_layer_norm_are_one_kernel() -> None:
    b = GraphBuilder()
    x = b.input(0, (4, 8), "float32")
    e = b.pointwise("exp", b.pointwise("sub", x, b.reduce("max", x, (1,), keepdim=True)))
    fused = fuse(b.finish([b.pointwise("div", e, b.reduce("sum", e, (1,), keepdim=True))]))
    assert len(fused.kernels) == 1


@pytest.mark.parametrize(
    ("shape", "axes", "kernels"),
    [
        ((40, 512), (0,), 1),
        ((4, 10, 512), (0, 1), 1),
        ((4, 10, 512), (1,), 1),
        ((512, 8), (0,), 2),  # of eight columns one thread would do all
    ],
)
def test_columns_are_one_kernel_with_what_reads_them(
    shape: tuple[int, ...], axes: tuple[int, ...], kernels: int
) -> None:
    b = GraphBuilder()
    x = b.input(0, shape, "float32")
    total = b.reduce("sum", b.pointwise("exp", x), axes)
    kept = [1 if k in axes else d for k, d in enumerate(shape)]
    whole = b.broadcast(b.reshape(total, kept), shape)
    graph = simplify(b.finish([b.pointwise("div", x, whole)]))
    fused = fuse(graph)
    assert len(fused.kernels) == kernels
    arrays = inputs_for(graph)
    assert_close(run_fused(fused, arrays), evaluate(graph, arrays), 1e-4)


def _conv(b: GraphBuilder, x: int, index: int) -> int:
    w = b.input(index, (4, 4, 3, 3), "float32", static=True)
    one = (1, 1)
    return b.append(
        "conv", (x, w), (1, 4, 6, 6), "float32", stride=one, lo=one, hi=one, dilation=one, groups=1
    )


def test_convolutions_pass_on_channels_last() -> None:
    b = GraphBuilder()
    x = b.input(0, (1, 4, 6, 6), "float32")
    first = b.pointwise("relu", _conv(b, x, 1))
    second = b.pointwise("add", _conv(b, first, 2), x)
    fused = fuse(b.finish([second]))
    assert len(fused.kernels) == 2
    between = fused.kernels[0].outputs[0]
    assert fused.orders[between] == channels_last(4)


@pytest.mark.parametrize("last", [True, False])
def test_a_maximum_and_its_position_are_one_kernel(last: bool) -> None:
    """A window was compared anew in a kernel for each of its positions."""
    b = GraphBuilder()
    x = b.input(0, (1, 4, 6, 6), "float32")
    three = {"kernel": (3, 3), "stride": (2, 2), "lo": (1, 1), "hi": (1, 1), "dilation": (1, 1)}
    best = b.append("window_max", (x,), (1, 4, 3, 3), "float32", **three)
    place = b.append("window_argmax", (x,), (1, 4, 3, 3), "int32", **three)
    wide = b.cast(place, "int64")
    graph = b.finish([best, wide])
    orders = dict.fromkeys((x, best), channels_last(4)) | {wide: channels_last(4) if last else None}
    fused = fuse(graph, {i: order for i, order in orders.items() if order is not None})
    assert [len(k.outputs) for k in fused.kernels] == ([2] if last else [1, 1])
    arrays = inputs_for(graph)
    for got, want in zip(run_fused(fused, arrays), evaluate(graph, arrays), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_residual_that_is_read_again_has_a_buffer() -> None:
    """A sum of two branches is written once by the contraction that finishes it."""
    b = GraphBuilder()
    x = b.input(0, (8, 8), "float32")
    w, v = (b.input(i, (8, 8), "float32", static=True) for i in (1, 2))
    total = b.pointwise("add", b.matmul(x, w), x)
    fused = fuse(b.finish([b.pointwise("add", b.matmul(total, v), total)]))
    assert [k.inputs for k in fused.kernels] == [(0, 1), (4, 2)]


def test_a_view_of_a_reduction_may_be_an_output() -> None:
    """Kernels depended on each other: the group read the buffer of a view of its own result."""
    b = GraphBuilder()
    x = b.input(0, (4,), "float32")
    highest = b.reshape(b.reduce("max", x, (0,)), (1,))
    graph = b.finish([highest, b.reduce("min", x, (0,)), b.pointwise("eq", x, highest)])
    arrays = [np.array([1, 3, 3, 2], np.float32)]
    assert_close(run_fused(fuse(graph), arrays), evaluate(graph, arrays), 0)


@pytest.mark.parametrize("kind", ["input", "view", "const", "twice"])
def test_outputs_that_nothing_computes(kind: str) -> None:
    b = GraphBuilder()
    x = b.input(0, (2, 3), "float32")
    outputs = {
        "input": [x],
        "view": [b.permute(x, (1, 0)), x],
        "const": [b.const(2.0, "float32")],
        "twice": [b.pointwise("neg", x)] * 2,
    }[kind]
    graph = b.finish(outputs)
    fused = fuse(graph)
    arrays = inputs_for(graph)
    assert len(fused.kernels) == (kind != "input")
    assert_close(run_fused(fused, arrays), evaluate(graph, arrays), 0)


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_buffers_stay_narrow(narrow: str) -> None:
    """What two kernels read as float32 is kept as it was rounded, and each of them widens it."""
    b = GraphBuilder()
    x = b.input(0, (8, 16), narrow)
    weights = [b.input(i, (16, 16), narrow, static=True) for i in (1, 2)]
    residual = b.cast(x, "float32")
    for w in weights:
        square = b.reduce("sum", b.pointwise("mul", residual, residual), (1,), keepdim=True)
        scaled = b.cast(b.pointwise("div", residual, square), narrow)
        product = b.cast(b.matmul(scaled, w), "float32")
        rounded = b.cast(b.pointwise("add", residual, product), narrow)
        residual = b.cast(rounded, "float32")
    graph = b.finish([residual])
    fused = fuse(graph)
    assert len(fused.kernels) == 4
    for kernel in fused.kernels:
        ends = {*kernel.inputs, *kernel.outputs} - {*graph.outputs}
        assert {graph.nodes[i].dtype for i in ends} == {narrow}
    arrays = inputs_for(graph)
    assert_close(run_fused(fused, arrays), evaluate(graph, arrays), 1e-2)


def test_products_read_wide_buffers() -> None:
    """A product of float32 does not widen its operands for every tile."""
    b = GraphBuilder()
    x, w = b.input(0, (8, 16), "bfloat16"), b.input(1, (16, 16), "float32", static=True)
    wide = b.cast(b.cast(b.pointwise("exp", b.cast(x, "float32")), "bfloat16"), "float32")
    fused = fuse(b.finish([b.matmul(wide, w)]))
    assert [fused.graph.nodes[k.outputs[0]].dtype for k in fused.kernels] == ["float32"] * 2


def test_what_is_looked_up_for_one_expression_has_no_buffer() -> None:
    b = GraphBuilder()
    x, at = b.input(0, (1, 8, 6, 5), "float32"), b.input(1, (9,), "int64")
    rows = b.append("take", (x, at), (1, 8, 9, 5), "float32", dim=2)
    near, far = (
        b.append("take", (rows, b.input(k, (7,), "int64")), (1, 8, 9, 7), "float32", dim=3)
        for k in (2, 3)
    )
    apart = b.pointwise("mul", b.pointwise("sub", far, near), b.input(4, (7,), "float32"))
    graph = b.finish([b.pointwise("exp", b.pointwise("add", near, apart))])
    assert len(fuse(graph).kernels) == 1


def test_what_an_expression_shares_counts_once() -> None:
    """Squares of squares are an operator each, not twice as many as the last; so are what is made
    of rows looked up for many columns, and parts put together, of which each is an expression."""
    b = GraphBuilder()
    parts = []
    for _ in range(3):
        at = b.input(len(parts) + 1, (4,), "int64")
        for _ in range(20):
            at = b.pointwise("add", at, at)
        x = b.append("take", (b.input(0, (8, 64), "float32"), at), (4, 64), "float32", dim=0)
        for _ in range(20):
            x = b.pointwise("mul", x, x)
        parts.append(x)
    graph = b.finish([b.append("cat", tuple(parts), (12, 64), "float32", dim=0)])
    assert len(fuse(graph).kernels) == 1


def test_what_is_widened_behind_a_view_is_read_from_a_narrow_buffer() -> None:
    """Sums in half precision that are seen in another shape before they are used: a gradient."""
    b = GraphBuilder()
    x, y = b.input(0, (4, 6, 12), "bfloat16"), b.input(1, (12, 12), "bfloat16")
    sums = b.cast(b.reduce("sum", b.cast(x, "float32"), [0, 1]), "bfloat16")
    wide = b.cast(b.reshape(sums, (1, 12)), "float32")
    product = b.pointwise("mul", b.broadcast(wide, (12, 12)), b.cast(y, "float32"))
    graph = b.finish([b.cast(product, "bfloat16")])
    fused = fuse(graph)
    assert len(fused.kernels) == 2
    assert [fused.graph.nodes[k.outputs[0]].dtype for k in fused.kernels] == ["bfloat16"] * 2
    arrays = inputs_for(graph)
    assert_close(run_fused(fused, arrays), evaluate(graph, arrays), 1e-2)
