"""Elementwise results that one kernel makes."""

from __future__ import annotations

from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.ir import GraphBuilder

SHAPE = (6, 8)


def outputs(b: GraphBuilder, results: list[int]) -> list[int]:
    """How many results each kernel has."""
    return sorted(len(k.outputs) for k in fuse(b.finish(results)).kernels)


def test_what_is_made_of_one_another() -> None:
    b = GraphBuilder()
    p, g, m, v = (b.input(k, SHAPE, "float32") for k in range(4))
    first = b.pointwise("add", m, g)
    second = b.pointwise("add", v, b.pointwise("mul", g, g))
    step = b.pointwise("div", first, b.pointwise("sqrt", second))
    assert outputs(b, [b.pointwise("sub", p, step), first, second]) == [3]


def test_not_what_has_nothing_to_do_with_it() -> None:
    b = GraphBuilder()
    p, q = (b.input(k, SHAPE, "float32") for k in range(2))
    assert outputs(b, [b.pointwise("exp", p), b.pointwise("exp", q)]) == [1, 1]


def waiting(b: GraphBuilder, first: int, w: int) -> int:
    """What waits for a product of ``first``, and is read at two places of that."""
    y = b.matmul(first, w)
    return b.pointwise("add", y, b.permute(y, (1, 0)))


def test_not_what_waits_for_a_kernel_between() -> None:
    """The second reads the first, and a product of it."""
    b = GraphBuilder()
    p, w = (b.input(k, (8, 8), "float32") for k in range(2))
    first = b.pointwise("exp", p)
    second = b.pointwise("mul", first, waiting(b, first, w))
    assert outputs(b, [first, second]) == [1, 1, 1]


def test_not_what_waits_for_something_made_with_it() -> None:
    """``third`` is made with ``first``, and ``second`` waits for a product of it."""
    b = GraphBuilder()
    p, w = (b.input(k, (8, 8), "float32") for k in range(2))
    first = b.pointwise("exp", p)
    third = b.pointwise("neg", first)
    second = b.pointwise("mul", first, waiting(b, third, w))
    assert outputs(b, [first, second, third]) == [1, 1, 2]


def test_not_other_places_or_types() -> None:
    for view in ("turned", "narrow", "repeated"):
        b = GraphBuilder()
        first = b.pointwise("exp", b.input(0, (8, 8), "float32"))
        if view == "turned":
            second = b.pointwise("neg", b.permute(first, (1, 0)))
        elif view == "narrow":
            second = b.cast(b.pointwise("neg", first), "bfloat16")
        else:
            second = b.pointwise("neg", b.broadcast(b.reshape(first, (1, 8, 8)), (3, 8, 8)))
        assert outputs(b, [first, second]) == [1, 1], view


def test_not_more_than_a_core_follows() -> None:
    b = GraphBuilder()
    results = [b.pointwise("exp", b.input(0, SHAPE, "float32"))]
    for k in range(1, 9):
        results.append(b.pointwise("add", results[-1], b.input(k, SHAPE, "float32")))
    assert max(outputs(b, results)) == 4
