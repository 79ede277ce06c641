"""Sums across the lanes of many vectors at once: as many vectors as each has lanes, into one.

Halves of two vectors are added so that one vector holds both, and so on: an addition and two
shuffles for a pair, where one vector after another takes that many for each halving.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import (
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    imm,
    loop,
    vector,
)
from torch_pruner.codegen.tir.values import store

if TYPE_CHECKING:
    from collections.abc import Sequence

_LANE = 4  # elements that shuffles move within for one cycle, of 32 bits


def sums_across(acc: Buffer, lanes: int) -> tuple[list[Stmt], int]:
    """Adds up each of the ``lanes`` vectors in ``acc``: the sum of vector ``i`` is in lane ``i``.

    Returns statements that overwrite ``acc``, and the position of the vector that holds the sums.
    ``lanes`` is a power of two, at least 2.
    """
    row = _leaves(lanes)
    stmts: list[Stmt] = []
    for low, high in _folds(lanes):
        merged = []
        for left, right in zip(row[::2], row[1::2], strict=True):
            pair = [acc[vector(imm(at * lanes), lanes)] for at in (left, right)]
            both = _shuffled(pair, low) + _shuffled(pair, high)
            stmts.append(S.BufferStore(acc, both, [vector(imm(left * lanes), lanes)]))
            merged.append(left)
        row = merged
    return stmts, row[0] * lanes


def _shuffled(pair: Sequence[Expr], order: Sequence[int]) -> Expr:
    return T.Shuffle(list(pair), [T.const(i, "int32") for i in order])


def _folds(lanes: int) -> list[tuple[list[int], list[int]]]:
    """Of each step, which elements of two vectors meet: positions in both, one after the other."""
    steps, width = [], lanes // 2
    while width:
        span = lanes if width >= _LANE else min(_LANE, lanes)
        low = [
            which * lanes + block * span + part * 2 * width + e
            for block in range(lanes // span)
            for which in (0, 1)
            for part in range(span // (2 * width))
            for e in range(width)
        ]
        steps.append((low, [i + width for i in low]))
        width //= 2
    return steps


def _leaves(lanes: int) -> list[int]:
    """The order of vectors for which sums end in the order of vectors."""
    rows = [[i] * lanes for i in range(lanes)]
    for low, _ in _folds(lanes):
        rows = [
            [(left + right)[i] for i in low]
            for left, right in zip(rows[::2], rows[1::2], strict=True)
        ]
    order = [0] * lanes
    for lane, leaf in enumerate(rows[0]):
        order[leaf] = lane
    return order


def fold_lanes(sums: Buffer, first: Expr, lanes: int) -> list[Stmt]:
    """Adds the ``lanes`` (a power of two) elements from ``first`` on up into the first of them:
    the upper half of a vector to the lower one, and halves of that."""

    def folded(width: int) -> Stmt:
        def lane(v: Expr) -> Stmt:
            return store(sums, first + v, sums[first + v] + sums[first + width + v])

        return loop(width, lane, VECTORIZED, "v")

    return [folded(lanes >> n) for n in range(1, lanes.bit_length())]
