"""Both products of attention in bfloat16 by pairs: two numbers of the sum with every instruction.

Neighbours along a head lie in a word of queries and of keys, neighbouring keys in a word of values.
Powers are rounded to bfloat16, as eager rounds its weights, and lie where their scores were: the
words of two keys in the first half of these rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.attention_tile import (
    Nest,
    counted,
    key_at,
    over_lanes,
    value_at,
)
from torch_pruner.codegen.parts.pair_words import WORD, added, words
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    stack,
    vector,
    when,
)
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.codegen.tir.values import store

if TYPE_CHECKING:
    from collections.abc import Callable

    Power = Callable[[Nest, Expr, Expr, Buffer | None], Stmt]  # of a key and a lane


def added_to_scores(nest: Nest, sums: Buffer, keys: tuple[Buffer, Expr, int], step: Expr) -> Stmt:
    """The products of a word of each key (the copy, the first and how many) and of all queries."""
    copy, first, rows = keys

    def each(i: Expr) -> Stmt:
        key = copy[key_at(nest, first + i, step)]

        def some(j: Expr) -> Stmt:
            queries = nest.query[vector(nest.query_lane(step, j * nest.vl), nest.vl)]
            return added(sums, i * nest.lanes + j * nest.vl, key, queries)

        return loop(nest.nv, some, UNROLLED, "j")

    return loop(rows, each, UNROLLED, "i")


def powers_in_pairs(nest: Nest, power: Power) -> Stmt:
    """Powers of all keys; behind the last that is seen there is a 0, if it has no neighbour."""
    first, second = (buffer(nest.lanes, nest.dtype, n, scope="local") for n in ("even", "odd"))
    zero = T.const(0, nest.dtype)

    def pair(at: Expr, alone: bool) -> Stmt:
        def other(v: Expr) -> Stmt:
            return store(second, v, zero) if alone else power(nest, at * 2 + 1, v, second)

        def left(j: Expr) -> Stmt:
            lanes = vector(j * nest.vl, nest.vl)
            both = T.reinterpret(f"float32x{nest.vl}", words(first[lanes], second[lanes]))
            return S.BufferStore(
                nest.scores, both, [vector(nest.score_at(at, j * nest.vl), nest.vl)]
            )

        return seq(
            [
                over_lanes(nest, lambda v: power(nest, at * 2, v, first)),
                over_lanes(nest, other),
                loop(nest.nv, left, UNROLLED, "j"),
            ]
        )

    if nest.bounded:
        whole, rest = T.floordiv(nest.end, 2), T.floormod(nest.end, 2)
        parts = [
            counted(whole, lambda at: pair(at, False), "pair"),
            when(rest > 0, pair(whole, True)),
        ]
    else:
        even, odd = divmod(nest.att.keys, 2)
        parts = [loop(even, lambda at: pair(at, False), name="pair")]
        parts += [pair(imm(even), True)] if odd else []
    return seq([stack(first), stack(second), *parts])


def added_to_sums(
    nest: Nest, sums: Buffer, pair: Expr, rows: tuple[Expr, int], columns: tuple[Expr, int]
) -> Stmt:
    """The products of the powers of two keys and their values, for a register tile."""
    values, (row, some), (slot, many) = nest.values, rows, columns
    assert values is not None

    def each(i: Expr) -> Stmt:
        powers = T.reinterpret(WORD, nest.scores[nest.score_at(pair, row + i)])

        def vectors(j: Expr) -> Stmt:
            found = values[vector(value_at(nest, pair, slot, many, j), nest.vl)]
            return added(sums, (i * many + j) * nest.vl, powers, found)

        return loop(many, vectors, UNROLLED, "j")

    return loop(some, each, UNROLLED, "i")
