"""Copies that a contraction makes of its operands: panels, padded inputs, wider rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import behind
from torch_pruner.codegen.parts.interleaved import interleaved, interleaves
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
from torch_pruner.codegen.tir.values import element_dtype, load, store, value_dtype
from torch_pruner.graph.adjacency import columns_adjacent, packs_in_squares

_TURNS = 64

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.parts.operands import Nest


def pack_panel(nest: Nest) -> Stmt:
    """Copy a second operand that is not constant into panels, once per call, as it lies."""
    con, panel = nest.con, nest.panel
    assert panel is not None

    def block(p: Expr) -> Stmt:
        g, nb = unlinear(p, (con.groups, nest.blocks))
        return _pack_block(nest, _Block(panel, p * con.depth, imm(0), con.k), g, nb)

    return loop(con.groups * nest.blocks, block, nest.kind, name="p")


def pack_near(nest: Nest, g: Expr, nb: Expr, kb: Expr) -> Stmt:
    """Copy a block of a panel of a product's second operand into ``near``, from where it lies."""
    assert nest.near is not None
    block = _Block(nest.near, imm(0), kb * nest.block_depth, (nest.block_depth,))
    return _pack_block(nest, block, g, nb)


@dataclass(frozen=True, slots=True)
class _Block:
    """Positions of the reduction, of extents ``k`` from ``first`` on, and rows of a buffer."""

    into: Buffer
    row: Expr  # of the buffer, for the first of them
    first: Expr
    k: tuple[int, ...]


def _pack_block(nest: Nest, block: _Block, g: Expr, nb: Expr) -> Stmt:
    con, bn, vl, into = nest.con, nest.bn, nest.vl, block.into
    depth, dtype = math.prod(block.k), value_dtype(element_dtype(into))

    def element(flat: Expr, v: Expr, *, guarded: bool) -> Stmt:
        column = nb * bn + v
        value = second_operand(nest, g, unlinear(block.first + flat, con.k), column)
        if guarded:
            zero = T.const(0, value_dtype(nest.spec.nodes[con.b].dtype))
            value = T.if_then_else(column < con.n, value, zero)
        return store(into, (block.row + flat) * bn + v, value.astype(dtype))

    def by_columns() -> Stmt:
        def column(v: Expr) -> Stmt:
            guarded = bool(con.n % bn)
            return loop(depth, lambda k: element(k, v, guarded=guarded), name="k")

        return loop(bn, column, name="v")

    def whole(k: Expr) -> Stmt:
        def vector(j: Expr) -> Stmt:
            return loop(vl, lambda v: element(k, j * vl + v, guarded=False), VECTORIZED, "v")

        return loop(nest.nv, vector, UNROLLED, "j")

    def cut(k: Expr) -> Stmt:
        return loop(bn, lambda v: element(k, v, guarded=True), name="v")

    if not columns_adjacent(nest.spec, con):
        squares = packs_in_squares(nest.spec, con, vl)
        return _in_squares(nest, block, g, nb) if squares else by_columns()
    rows = loop(depth, whole, name="k")
    if con.n % bn == 0:
        return rows
    return when(nb < nest.blocks - 1, rows, loop(depth, cut, name="k"))


def _in_squares(nest: Nest, block: _Block, g: Expr, nb: Expr) -> Stmt:
    """Vectors along the reduction, turned: the last ones begin earlier, and columns past the last
    repeat it, whose sums are not stored."""
    con, bn, vl = nest.con, nest.bn, nest.vl
    *outer, last = block.k

    def square(r: Expr, at: Expr, j: Expr) -> Stmt:
        begin = T.min(at * vl, imm(last - vl)) if last % vl else at * vl

        def taken(i: Expr, v: Expr) -> Expr:
            column = nb * bn + j * vl + i
            column = T.min(column, imm(con.n - 1)) if con.n % bn else column
            k = begin + v if outer else block.first + (begin + v)
            return second_operand(nest, g, (*unlinear(r, tuple(outer)), k), column)

        def left(i: Expr, v: Expr) -> tuple[Buffer, Expr]:
            return block.into, (block.row + r * last + begin + i) * bn + j * vl + v

        return in_square(nest, value_dtype(element_dtype(block.into)), taken, left)

    def along(r: Expr) -> Stmt:
        def step(at: Expr) -> Stmt:
            return loop(nest.nv, lambda j: square(r, at, j), name="j")

        return loop(-(-last // vl), step, name="k")

    return loop(math.prod(outer), along, name="r")


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
                value = value.astype(value_dtype(element_dtype(packed)))
                return store(packed, ((g * nest.tiles + at) * con.depth + k) * tm + i, value)

            body = nest.reader.scope(lambda: [loop(tm, row, UNROLLED, "i")])
            return body if nest.tiles % _TILES == 0 else when(at < nest.tiles, body)

        return loop(con.depth, lambda k: loop(_TILES, lambda t: tile(k, t), name="t"), name="k")

    return loop(con.groups * bands, band, nest.kind, name="p")


def widen_block(nest: Nest, g: Expr, nb: Expr, kb: Expr) -> Stmt:
    """Convert a block of a panel into ``near``, for all tiles that pass by it."""
    panel, near, vl = nest.panel, nest.near, nest.vl
    assert panel is not None
    assert near is not None
    first = ((g * nest.blocks + nb) * nest.kb + kb) * (nest.block_depth * nest.bn)

    def lane(at: Expr) -> Stmt:
        return store(near, at, load(panel, first + at).astype(element_dtype(near)))

    def row(k: Expr) -> Stmt:
        def vector(j: Expr) -> Stmt:
            return loop(vl, lambda v: lane((k * nest.nv + j) * vl + v), VECTORIZED, "v")

        return loop(nest.nv, vector, UNROLLED, "j")

    return loop(nest.block_depth, row, name="k")


def copy_first(nest: Nest) -> Stmt:
    """Copy the first operand as float32, or padded, or both."""
    if nest.con.conv is None:
        return _widen_rows(nest)
    return interleaved(nest) if interleaves(nest) else pad_input(nest)


def _widen_rows(nest: Nest) -> Stmt:
    con, copied = nest.con, nest.copied
    assert copied is not None

    def row(p: Expr) -> Stmt:
        g, at = unlinear(p, (con.groups, con.rows))
        where = (*unlinear(g, con.batch), at)

        def element(k: Expr) -> Stmt:
            value = nest.reader.at(con.a, (*where, k))
            return store(copied, p * con.depth + k, value.astype(element_dtype(copied)))

        return nest.reader.scope(lambda: [_channels(con.depth, nest.vl, element)])

    return loop(con.groups * con.rows, row, nest.kind, name="row")


def pad_input(nest: Nest) -> Stmt:
    """Copy the input channels-last with its padding and the zeros between dilated elements."""
    con, conv, padded = nest.con, nest.con.conv, nest.copied
    assert conv is not None
    assert padded is not None
    x = nest.spec.nodes[con.a]
    images, channels, *extent = x.shape
    zero = T.const(0, value_dtype(element_dtype(padded)))
    shape = (images, *conv.padded, channels)
    lines = (images, *conv.padded[:-1])
    # Rows that are needed read as much of the copy.
    reached: list[Expr | None] = [None] * len(con.m)
    for d, n in enumerate(nest.counts):
        if n is not None:
            stride = conv.stride[d - 1] if d else 1
            reached[d] = n * stride + (shape[d] - con.m[d] * stride)

    def widened(index: Index) -> Expr:
        return nest.reader.at(con.a, index).astype(value_dtype(element_dtype(padded)))

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
