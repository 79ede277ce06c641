"""Copies that a contraction makes of its operands: panels, padded inputs, wider rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import behind
from torch_pruner.codegen.parts.operands import second_operand
from torch_pruner.codegen.parts.transposed import in_square
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    Stmt,
    T,
    loop,
    seq,
    when,
)
from torch_pruner.codegen.tir.reader import Index, imm, linear, unlinear
from torch_pruner.codegen.tir.values import load, store, value_dtype
from torch_pruner.graph.adjacency import columns_adjacent, packs_in_squares

_TURNS = 64

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.parts.operands import Nest


def pack_panel(nest: Nest) -> Stmt:
    """Copy a second operand that is not constant into panels, once per call, as it lies."""
    con, bn, vl = nest.con, nest.bn, nest.vl
    panel = nest.panel
    assert panel is not None
    squares = packs_in_squares(nest.spec, con, vl)

    def element(p: Expr, nb: Expr, flat: Expr, v: Expr, *, guarded: bool) -> Stmt:
        g, column = unlinear(p, (con.groups, nest.blocks))[0], nb * bn + v
        value = second_operand(nest, g, unlinear(flat, con.k), column)
        if guarded:
            zero = T.const(0, value_dtype(nest.spec.nodes[con.b].dtype))
            value = T.if_then_else(column < con.n, value, zero)
        value = value.astype(value_dtype(_element(panel)))
        return store(panel, (p * con.depth + flat) * bn + v, value)

    def by_columns(p: Expr, nb: Expr) -> Stmt:
        def column(v: Expr) -> Stmt:
            guarded = bool(con.n % bn)
            return loop(con.depth, lambda k: element(p, nb, k, v, guarded=guarded), name="k")

        return loop(bn, column, name="v")

    def in_squares(p: Expr, nb: Expr) -> Stmt:
        """Vectors along the reduction, turned: the last ones begin earlier, and columns past the
        last repeat it, whose sums are not stored."""
        g, dtype = unlinear(p, (con.groups, nest.blocks))[0], value_dtype(_element(panel))
        outer, last = con.k[:-1], con.k[-1]

        def square(r: Expr, block: Expr, j: Expr) -> Stmt:
            first = T.min(block * vl, imm(last - vl)) if last % vl else block * vl

            def taken(i: Expr, v: Expr) -> Expr:
                column = nb * bn + j * vl + i
                column = T.min(column, imm(con.n - 1)) if con.n % bn else column
                return second_operand(nest, g, (*unlinear(r, outer), first + v), column)

            def left(i: Expr, v: Expr) -> tuple[Buffer, Expr]:
                at = p * con.depth + r * last + first + i
                return panel, at * bn + j * vl + v

            return in_square(nest, dtype, taken, left)

        def along(r: Expr, block: Expr) -> Stmt:
            return loop(nest.nv, lambda j: square(r, block, j), name="j")

        return loop(
            math.prod(outer),
            lambda r: loop(-(-last // vl), lambda block: along(r, block), name="k"),
            name="r",
        )

    def whole(p: Expr, nb: Expr, k: Expr) -> Stmt:
        def vector(j: Expr) -> Stmt:
            def lane(v: Expr) -> Stmt:
                return element(p, nb, k, j * vl + v, guarded=False)

            return loop(vl, lane, VECTORIZED, "v")

        return loop(nest.nv, vector, UNROLLED, "j")

    def cut(p: Expr, nb: Expr, k: Expr) -> Stmt:
        return loop(bn, lambda v: element(p, nb, k, v, guarded=True), name="v")

    def block(p: Expr) -> Stmt:
        _, nb = unlinear(p, (con.groups, nest.blocks))
        if not columns_adjacent(nest.spec, con):
            return in_squares(p, nb) if squares else by_columns(p, nb)
        rows = loop(con.depth, lambda k: whole(p, nb, k), name="k")
        if con.n % bn == 0:
            return rows
        last = loop(con.depth, lambda k: cut(p, nb, k), name="k")
        return when(nb < nest.blocks - 1, rows, last)

    return loop(con.groups * nest.blocks, block, nest.kind, name="p")


_TILES = 8  # whose rows are read side by side: a few cache lines


def pack_rows(nest: Nest) -> Stmt:
    """Copy a first operand whose rows are neighbours into tiles of rows, once per call.

    A last tile that is not full begins earlier, as register tiles do (``first_rows``).
    """
    con, tm, packed = nest.con, nest.tm, nest.rows
    assert packed is not None
    bands = -(-nest.tiles // _TILES)

    def band(p: Expr) -> Stmt:
        g, first = unlinear(p, (con.groups, bands))

        def tile(k: Expr, t: Expr) -> Stmt:
            at = first * _TILES + t
            start = T.min(at * tm, imm(con.rows - tm)) if con.rows % tm else at * tm

            def row(i: Expr) -> Stmt:
                value = nest.reader.at(con.a, (*unlinear(g, con.batch), start + i, k))
                value = value.astype(value_dtype(_element(packed)))
                return store(packed, ((g * nest.tiles + at) * con.depth + k) * tm + i, value)

            body = nest.reader.scope(lambda: [loop(tm, row, UNROLLED, "i")])
            return body if nest.tiles % _TILES == 0 else when(at < nest.tiles, body)

        return loop(con.depth, lambda k: loop(_TILES, lambda t: tile(k, t), name="t"), name="k")

    return loop(con.groups * bands, band, nest.kind, name="p")


def _element(buf: Buffer) -> str:
    return "bfloat16" if str(buf.dtype) == "uint16" else str(buf.dtype)


def widen_block(nest: Nest, g: Expr, nb: Expr, kb: Expr) -> Stmt:
    """Convert a block of a panel into ``near``, for all tiles that pass by it."""
    panel, near, vl = nest.panel, nest.near, nest.vl
    assert panel is not None
    assert near is not None
    first = ((g * nest.blocks + nb) * nest.kb + kb) * (nest.block_depth * nest.bn)

    def lane(at: Expr) -> Stmt:
        return store(near, at, load(panel, first + at).astype(_element(near)))

    def row(k: Expr) -> Stmt:
        def vector(j: Expr) -> Stmt:
            return loop(vl, lambda v: lane((k * nest.nv + j) * vl + v), VECTORIZED, "v")

        return loop(nest.nv, vector, UNROLLED, "j")

    return loop(nest.block_depth, row, name="k")


def copy_first(nest: Nest) -> Stmt:
    """Copy the first operand as float32, or padded, or both."""
    return pad_input(nest) if nest.con.conv is not None else _widen_rows(nest)


def _widen_rows(nest: Nest) -> Stmt:
    con, copied = nest.con, nest.copied
    assert copied is not None

    def row(p: Expr) -> Stmt:
        g, at = unlinear(p, (con.groups, con.rows))
        where = (*unlinear(g, con.batch), at)

        def element(k: Expr) -> Stmt:
            value = nest.reader.at(con.a, (*where, k))
            return store(copied, p * con.depth + k, value.astype(_element(copied)))

        return nest.reader.scope(lambda: [_channels(con.depth, nest.vl, element)])

    return loop(con.groups * con.rows, row, nest.kind, name="row")


def pad_input(nest: Nest) -> Stmt:
    """Copy the input channels-last with its padding and the zeros between dilated elements."""
    con, conv, padded = nest.con, nest.con.conv, nest.copied
    assert conv is not None
    assert padded is not None
    x = nest.spec.nodes[con.a]
    images, channels, *extent = x.shape
    zero = T.const(0, value_dtype(_element(padded)))
    shape = (images, *conv.padded, channels)
    lines = (images, *conv.padded[:-1])
    # Rows that are needed read as much of the copy.
    reached: list[Expr | None] = [None] * len(con.m)
    for d, n in enumerate(nest.counts):
        if n is not None:
            stride = conv.stride[d - 1] if d else 1
            reached[d] = n * stride + (shape[d] - con.m[d] * stride)

    def widened(index: Index) -> Expr:
        return nest.reader.at(con.a, index).astype(value_dtype(_element(padded)))

    def line(p: Expr) -> Stmt:
        image, *outer = unlinear(p, lines)

        def point(w: Expr) -> Stmt:
            inside, source = [], []
            for q, lo, d, size in zip((*outer, w), conv.lo, conv.dilate_input, extent, strict=True):
                shifted = q - lo
                if lo > 0:
                    inside.append(shifted >= 0)
                inside.append(shifted < (size - 1) * d + 1)
                if d != 1:
                    inside.append(T.floormod(shifted, d) == 0)
                source.append(T.floordiv(shifted, d) if d != 1 else shifted)
            base = linear((image, *outer, w, imm(0)), shape)

            def copy(value: Callable[[Expr], Expr]) -> Stmt:
                return _channels(channels, nest.vl, lambda c: store(padded, base + c, value(c)))

            read = nest.reader.scope(lambda: [copy(lambda c: widened((image, c, *source)))])
            body = when(T.all(*inside), read, copy(lambda c: zero))
            return behind(body, (w,), reached[-1:])

        points = loop(conv.padded[-1], point, name="w")
        return behind(points, (image, *outer), reached[:-1])

    total = math.prod(lines)
    if all(n is None for n in reached):
        return loop(total, line, nest.kind, name="line")
    turns = min(_TURNS, total)  # a thread's run of lines could have nothing to do
    each = -(-total // turns)

    def in_turn(p: Expr) -> Stmt:
        at = T.floormod(p, each) * turns + T.floordiv(p, each)
        return line(at) if total % turns == 0 else when(at < total, line(at))

    return loop(each * turns, in_turn, nest.kind, name="line")


def _channels(count: int, vl: int, body: Callable[[Expr], Stmt]) -> Stmt:
    """Vectors over ``count`` elements and a scalar remainder."""
    parts = []
    whole = count // vl
    if whole:
        parts.append(
            loop(whole, lambda o: loop(vl, lambda v: body(o * vl + v), VECTORIZED, "v"), name="c")
        )
    if count % vl:
        parts.append(loop(count % vl, lambda v: body(whole * vl + v), name="c"))
    return seq(parts)
