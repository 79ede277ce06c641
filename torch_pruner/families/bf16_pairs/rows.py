"""The copy of the first operand: rows of bfloat16 with k contiguous, padded with zeros.

A convolution's rows are what its windows hold: kernel offsets, in each all channels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.transposed import in_square
from torch_pruner.codegen.tir.builders import VECTORIZED, Expr, ForKind, Stmt, T, loop, seq, when
from torch_pruner.codegen.tir.reader import imm, unlinear
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.families.bf16_pairs.form import COLUMNS, is_half, turned
from torch_pruner.families.bf16_pairs.rounding import rounded_vector

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.tir.reader import Index
    from torch_pruner.families.bf16_pairs.nest import PairNest


def copy_rows(nest: PairNest, kind: ForKind) -> Stmt:
    """The copy as a loop of ``kind`` over rows, or blocks of rows where these are neighbours."""
    con = nest.con
    if con.conv is None and turned(nest.spec, con):
        return _turned(nest, kind)

    def row(p: Expr) -> Stmt:
        g, r = unlinear(p, (con.groups, con.rows))
        base = p * nest.form.depth
        parts = [_window(nest, r, base) if con.conv else _row(nest, g, r, base)]
        if pad := nest.form.depth - con.depth:
            parts.append(loop(pad, lambda k: _zero(nest, base + con.depth + k), name="k"))
        return seq(parts)

    return loop(con.groups * con.rows, row, kind, name="p")


def _turned(nest: PairNest, kind: ForKind) -> Stmt:
    """Rows that are neighbours in memory, by squares of vectors: the last ones begin earlier."""
    con, depth, copy = nest.con, nest.form.depth, nest.copy
    blocks = -(-con.rows // COLUMNS)
    assert copy is not None

    def block(p: Expr) -> Stmt:
        g, number = unlinear(p, (con.groups, blocks))
        batch = unlinear(g, con.batch)
        first = number * COLUMNS
        if con.rows % COLUMNS:
            first = T.min(first, imm(con.rows - COLUMNS))
        base = (g * con.rows + first) * depth

        def square(o: Expr) -> Stmt:
            k = o * COLUMNS
            if con.depth % COLUMNS:
                k = T.min(k, imm(con.depth - COLUMNS))
            return in_square(
                nest,
                "bfloat16",
                lambda i, v: nest.reader.at(con.a, (*batch, first + v, k + i)),
                lambda i, v: (copy, base + i * depth + k + v),
            )

        def padding(i: Expr) -> Stmt:
            at = base + i * depth + con.depth
            return loop(depth - con.depth, lambda k: _zero(nest, at + k), name="k")

        parts = [loop(-(-con.depth // COLUMNS), square, name="k")]
        if depth > con.depth:
            parts.append(loop(COLUMNS, padding, name="i"))
        return seq(parts)

    return loop(con.groups * blocks, block, kind, name="p")


def _row(nest: PairNest, g: Expr, r: Expr, base: Expr) -> Stmt:
    con = nest.form.con
    batch = unlinear(g, con.batch)
    return line_of(nest, base, con.depth, lambda k: (*batch, r, k))


def _window(nest: PairNest, r: Expr, base: Expr) -> Stmt:
    con = nest.form.con
    conv, (*kernel, channels) = con.conv, con.k
    assert conv is not None
    image, *place = unlinear(r, con.m)
    extents = nest.spec.nodes[con.a].shape[2:]

    def offset(o: Expr) -> Stmt:
        taps = unlinear(o, tuple(kernel))
        at, inside = [], []
        for i, tap in enumerate(taps):
            where = place[i] * conv.stride[i] + tap * conv.dilation[i] - conv.lo[i]
            at.append(where)
            if conv.lo[i]:
                inside.append(where >= 0)
            if conv.padded[i] > extents[i] + conv.lo[i]:
                inside.append(where < extents[i])
        first = base + o * channels
        line = line_of(nest, first, channels, lambda c: (image, c, *at))
        if not inside:
            return line
        return when(T.all(*inside), line, zeros(nest, first, channels))

    return loop(math.prod(kernel), offset, name="o")


def line_of(nest: PairNest, base: Expr, length: int, index: Callable[[Expr], Index]) -> Stmt:
    """``length`` neighbours of the copy from ``base`` on; ``index`` of them in the operand."""
    con, copy, scope = nest.form.con, nest.copy, nest.reader.scope
    assert copy is not None

    def value(k: Expr) -> Expr:
        return nest.reader.at(con.a, index(k))

    def one(k: Expr) -> Stmt:
        return store(copy, base + k, value(k))

    def vector(o: Expr) -> Stmt:
        first = o * COLUMNS
        if not is_half(nest.spec, con.a):
            return rounded_vector(copy, base + first, lambda v: value(first + v), scope)
        return scope(lambda: [loop(COLUMNS, lambda v: one(first + v), VECTORIZED, "v")])

    whole, rest = divmod(length, COLUMNS)
    parts = [loop(whole, vector, name="k")] if whole else []
    if rest:
        parts.append(loop(rest, lambda k: one(whole * COLUMNS + k), name="k"))
    return seq(parts)


def zeros(nest: PairNest, base: Expr, length: int) -> Stmt:
    """``length`` zeros in the copy from ``base`` on."""
    whole, rest = divmod(length, COLUMNS)

    def vector(o: Expr) -> Stmt:
        first = base + o * COLUMNS
        return loop(COLUMNS, lambda v: _zero(nest, first + v), VECTORIZED, "v")

    parts = [loop(whole, vector, name="k")] if whole else []
    if rest:
        parts.append(loop(rest, lambda k: _zero(nest, base + whole * COLUMNS + k), name="k"))
    return seq(parts)


def _zero(nest: PairNest, at: Expr) -> Stmt:
    assert nest.copy is not None
    return store(nest.copy, at, T.const(0, value_dtype("bfloat16")))
