"""Concatenation of values with padding: what comes behind another begins where that ends."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner.graph._padded_builder import COUNT_DTYPE
from torch_pruner.graph._padding import UNKNOWN, Fact, NotAlikeError, Padding, axis_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.graph._padded_builder import PaddedBuilder
    from torch_pruner.graph._padding import Pair
    from torch_pruner.graph.ir import Node


def joined(writer: PaddedBuilder, a: Node, operands: Sequence[int]) -> int:
    """A concatenation in which padding comes between operands, one after the other."""
    dim, left = a.attr("dim"), operands[0]
    for right in operands[1:]:
        known, other = writer.known[left], writer.known[right]
        extents = known.pairs[dim], other.pairs[dim]
        total = (extents[0][0] + extents[1][0], extents[0][1] + extents[1][1])
        pairs = [total if d == dim else p for d, p in enumerate(known.pairs)]
        if known.along((dim,)):
            left = behind(writer, left, right, dim, pairs)
        else:
            left = writer.make("cat", [left, right], pairs, a.dtype, dim=dim)
    return left


def written(
    writer: PaddedBuilder, operands: Sequence[int], room: Pair, dim: int, pairs: Sequence[Pair]
) -> int:
    """The second operand in the room of the first, which has so much of it, behind what counts."""
    left, right = operands
    known, other = writer.known[left], writer.known[right]
    if any(a != b for d, (a, b) in enumerate(zip(known.dims, other.dims, strict=True)) if d != dim):
        raise NotAlikeError("operands of cat that vary along other factors")
    line = (other.pairs[dim],)
    place = writer.make("iota", [], line, "int64", dim=0)
    first = writer.make("cast", [writer.count(room)], (), "int64")
    at = writer.make("add", [place, first], line, "int64")
    shape, dtype = [large for large, _ in pairs], writer.builder.dtype(left)
    result = writer.builder.append(
        "update", (left, right, at), shape, dtype, dim=dim, in_place=True
    )
    dims = tuple(axis_of(pairs[dim]) if d == dim else f for d, f in enumerate(known.dims))
    plain = Padding(dims)
    # The rows are written where they count: behind them is what was there.
    facts = [Fact(0.0) if axis == dim else UNKNOWN for axis, _ in plain.varying]
    return writer.kept(result, replace(plain, facts=tuple(facts)))


def behind(writer: PaddedBuilder, left: int, right: int, dim: int, pairs: Sequence[Pair]) -> int:
    """``right`` behind what counts of ``left`` along an axis: a cache that grows by a token.

    The padding of ``left`` would come between them, so where ``right`` lies is computed.
    """
    known, other, line = writer.known[left], writer.known[right], (pairs[dim],)
    rest = [[f for d, f in enumerate(x.dims) if d != dim] for x in (known, other)]
    if rest[0] != rest[1]:
        raise NotAlikeError("operands of cat that vary along other factors")
    known.padding_last(dim)
    other.padding_last(dim)
    first = writer.count(known.pairs[dim])
    place = writer.make("iota", [], line, COUNT_DTYPE, dim=0)
    at = writer.make("sub", [place, first], line, COUNT_DTYPE)
    last = other.pairs[dim][0] - 1
    for op, bound in (("maximum", 0), ("minimum", last)):
        at = writer.make(op, [at, writer.const(bound, COUNT_DTYPE)], line, COUNT_DTYPE)
    shape, dtype = [large for large, _ in pairs], writer.builder.dtype(left)
    dims = tuple(axis_of(pairs[dim]) if d == dim else f for d, f in enumerate(known.dims))
    plain = Padding(dims)
    padding = replace(plain, facts=(UNKNOWN,) * len(plain.varying))
    hi = tuple(last + 1 if d == dim else 0 for d in range(len(shape)))
    ends = {"lo": (0,) * len(shape), "hi": hi, "value": 0}
    early = writer.kept(writer.builder.append("pad", (left,), shape, dtype, **ends), padding)
    late = writer.builder.append("take", (right, at), shape, dtype, dim=dim)
    late = writer.kept(late, padding)
    test = writer.make("lt", [place, first], line, "bool")
    alone = [pairs[dim] if d == dim else (1, 1) for d in range(len(shape))]
    if len(alone) > 1:
        test = writer.make("reshape", [test], alone, "bool")
    test = writer.kept(writer.builder.broadcast(test, shape), padding)
    return writer.kept(writer.builder.append("where", (test, early, late), shape, dtype), padding)
