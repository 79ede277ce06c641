"""What products of pairs take from the tiles of attention's gradient: weights and the gradient of
scores, rounded, two queries in a word; of the latter two keys in a word, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.attention_tile import counted
from torch_pruner.codegen.parts.pair_words import of_bits, round_vector
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    loop,
    seq,
    vector,
    when,
)
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.codegen.tir.values import held_bits, store

if TYPE_CHECKING:
    from torch_pruner.families.attention_gradient.nest import Nest, Part


def rounded(
    nest: Nest, keys: tuple[Expr, int], panels: tuple[Expr, int], tile: Buffer, to: Part
) -> Stmt:
    """A register tile of float32 into a part of bfloat16."""
    (key, some), (panel, many), vl = keys, panels, nest.vl

    def each(i: Expr, j: Expr) -> Stmt:
        made = round_vector(tile[vector((i * many + j) * vl, vl)])
        at = nest.weight_at(to, key + i, panel, j * vl)
        return S.BufferStore(to.buffer, made, [vector(at, vl)])

    return loop(some, lambda i: loop(many, lambda j: each(i, j), UNROLLED, "j"), UNROLLED, "i")


def words_of_keys(nest: Nest, made: Expr) -> Stmt:
    """The gradient of scores of so many keys in words of two; behind an odd one there is 0."""
    part, plan, changes = nest.by_keys, nest.plan, nest.changes
    assert part is not None
    panels, rows = plan.lanes // plan.panel, nest.steps(plan.kb)

    def pair(at: Expr, alone: bool) -> Stmt:
        def lane(panel: Expr, lane: Expr) -> Stmt:
            first, second = (
                held_bits(changes.buffer, nest.weight_at(changes, at * 2 + k, panel, lane))
                for k in (0, 1)
            )
            second = T.const(0, "uint32") if alone else second
            place = nest.turned_at(part, rows, at, panel, lane)
            return store(part.buffer, place, of_bits(first, second))

        def panel(p: Expr) -> Stmt:
            return loop(plan.panel, lambda v: lane(p, v), VECTORIZED, "v")

        return loop(panels, panel, name="panel")

    whole, rest = T.floordiv(made, imm(2)), T.floormod(made, imm(2))
    pairs = counted(whole, lambda at: pair(at, False), "pair")
    return seq([pairs, when(rest > 0, pair(whole, True))])
