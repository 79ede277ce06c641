"""Rules of ``simplify`` for ``cat``: what only reorders or repeats one value is a view of it.

A ``cat`` is a kernel of its own, a view is index arithmetic in its readers: so rotary embedding,
which swaps the halves of every head and negates one, stays in one kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.graph.ir import GraphBuilder, Shape


def as_view(b: GraphBuilder, parts: Sequence[int], shape: Shape, dim: int) -> int | None:
    """A node equal to the ``cat`` of ``parts`` along ``dim`` without any copy, or None."""
    if len(set(parts)) == 1 and len(parts) > 1:
        return _repeated(b, parts[0], len(parts), shape, dim)
    return _swapped(b, parts[0], parts[1], shape, dim) if len(parts) == 2 else None


def _repeated(b: GraphBuilder, x: int, times: int, shape: Shape, dim: int) -> int:
    source = b.shape(x)
    one = b.reshape(x, (*source[:dim], 1, *source[dim:]))
    many = b.broadcast(one, (*source[:dim], times, *source[dim:]))
    return b.reshape(many, shape)


def _swapped(b: GraphBuilder, left: int, right: int, shape: Shape, dim: int) -> int | None:
    """The halves of one value in turned order, each possibly negated."""
    (first, negated), (second, negated_second) = (_signed(b, x) for x in (left, right))
    one, two = b.nodes[first], b.nodes[second]
    if one.op != "slice" or two.op != "slice" or one.inputs != two.inputs or shape[dim] % 2:
        return None
    x, half = one.inputs[0], shape[dim] // 2
    middle = tuple(half if i == dim else 0 for i in range(len(shape)))
    whole = b.shape(x) == shape and one.shape == two.shape
    steps = {*one.attr("steps"), *two.attr("steps")}
    if not whole or one.attr("starts") != middle or any(two.attr("starts")) or steps != {1}:
        return None
    pairs = b.reshape(x, (*shape[:dim], 2, half, *shape[dim + 1 :]))
    turned = b.append("flip", (pairs,), b.shape(pairs), b.dtype(x), dims=(dim,))
    if negated or negated_second:
        negative = b.pointwise("neg", turned)
        if negated and negated_second:
            turned = negative
        else:
            side = b.append("iota", (), (2, *[1] * (len(shape) - dim)), "int32", dim=0)
            chosen = b.pointwise("eq", side, b.const(0 if negated else 1, "int32"))
            turned = b.pointwise("where", chosen, negative, turned)
    return b.reshape(turned, shape)


def _signed(b: GraphBuilder, x: int) -> tuple[int, bool]:
    node = b.nodes[x]
    return (node.inputs[0], True) if node.op == "neg" else (x, False)
