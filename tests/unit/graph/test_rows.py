"""What row kernels read of each other, and how their rows lie in memory."""

from __future__ import annotations

from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.rows import meet_others, row_domain, steps_along


def softmax(*, turned: bool) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (5, 100), "float32")
    powers = b.pointwise("exp", b.pointwise("sub", x, b.reduce("max", x, [1], keepdim=True)))
    y = b.pointwise("div", powers, b.reduce("sum", powers, [1], keepdim=True))
    if turned:
        y = b.pointwise("add", y, b.append("flip", (y,), (5, 100), "float32", dims=(1,)))
    return b.finish([y])


def test_who_reads_what_others_have_kept() -> None:
    plain, turned = softmax(turned=False), softmax(turned=True)
    assert row_domain(plain).kept_values  # the powers
    assert not meet_others(plain, row_domain(plain))
    assert meet_others(turned, row_domain(turned))


def summed(axes: list[int], perm: tuple[int, ...] | None = None) -> Graph:
    """Squares of (4, 6, 8), of a weight for each of the last axis, summed."""
    b = GraphBuilder()
    shape = (4, 6, 8)
    given = shape if perm is None else tuple(shape[perm.index(a)] for a in range(3))
    x = b.input(0, given, "float16")
    x = x if perm is None else b.permute(x, perm)
    w = b.broadcast(b.reshape(b.input(1, (8,), "float32"), (1, 1, 8)), shape)
    wide = b.pointwise("mul", b.cast(x, "float32"), w)
    return b.finish([b.reduce("sum", wide, axes), b.permute(wide, (2, 0, 1))])


def test_steps_between_neighbours() -> None:
    spec = summed([2])
    domain = row_domain(spec)
    # The input, weights that are the same for all rows, an output whose last axis comes first.
    assert steps_along(spec, domain, 2) == [(192, 2, 1), (8, 4, 1), (192, 4, 24)]
    assert steps_along(spec, domain, 1) == [(192, 2, 8), (8, 4, 0), (192, 4, 1)]


def test_steps_of_what_lies_in_another_order() -> None:
    spec = summed([2], perm=(0, 2, 1))  # channels first in memory
    domain = row_domain(spec)
    assert steps_along(spec, domain, 2)[0] == (192, 2, 6)
    assert steps_along(spec, domain, 1)[0] == (192, 2, 1)
