"""The order of axes in which convolutions and what follows them are computed."""

from __future__ import annotations

from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.stored import order_before, stored_orders

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
SAME = {"stride": (1, 1), "lo": (1, 1), "hi": (1, 1), "dilation": (1, 1), "groups": 1}


def convolution(b, x):
    w = b.input(1, (8, 4, 3, 3), "float32", static=True)
    return b.append("conv", (x, w), (1, 8, 5, 6), "float32", **SAME)


def test_a_convolution_lies_as_the_permutation_after_it_wants() -> None:
    b = GraphBuilder()
    conv = convolution(b, b.input(0, (1, 4, 5, 6), "float32"))
    relu = b.pointwise("relu", conv)
    spec = b.finish([b.permute(relu, LAST)])
    assert stored_orders(spec) == {conv: LAST, relu: LAST}


def test_without_one_it_lies_as_its_operand_does() -> None:
    b = GraphBuilder()
    x = b.permute(b.input(0, (1, 5, 6, 4), "float32"), FIRST)
    conv = convolution(b, x)
    spec = b.finish([b.reduce("sum", conv, (2, 3))])
    assert order_before(spec, x) == LAST
    assert stored_orders(spec) == {conv: LAST}


def test_without_permutations_nothing_is_ordered() -> None:
    b = GraphBuilder()
    x, w = b.input(0, (3, 4), "float32"), b.input(2, (4, 5), "float32")
    y = b.input(1, (1, 4, 5, 6), "float32")
    spec = b.finish([convolution(b, y), b.permute(b.matmul(x, w), (1, 0))])
    assert stored_orders(spec) == {}


def test_what_has_another_shape_is_not_followed() -> None:
    b = GraphBuilder()
    conv = convolution(b, b.input(0, (1, 4, 5, 6), "float32"))
    both = b.pointwise("add", b.broadcast(conv, (3, 8, 5, 6)), b.input(2, (3, 8, 5, 6), "float32"))
    spec = b.finish([b.permute(both, LAST)])
    assert stored_orders(spec) == {}
