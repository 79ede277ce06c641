"""Rows of a convolution of which so many are needed along each axis as is known at run time.

Tiles take rows that are needed one after another, across lines. What readers want as it is where
the sum itself is masked (the zeros around an image that a window reads) is written apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import divided, needed, row_axes
from torch_pruner.codegen.parts.row_tiles import Rows, TilePosition, write_tile
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    index_dtype,
    index_var,
    loop,
    seq,
    stack,
)
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.codegen.tir.values import store
from torch_pruner.graph.extents import axis_counts

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.operands import Nest
    from torch_pruner.codegen.tir.reader import Index

__all__ = ["Walk", "count_rows", "tiles", "write_masked"]


def count_rows(nest: Nest) -> None:
    """Find out of which rows ``nest`` sums products, and of which it writes results."""
    con, shape = nest.con, nest.spec.nodes[nest.con.anchor].shape
    outer = axis_counts(shape, nest.unwritten)
    inner = axis_counts(shape, nest.unwritten | nest.unneeded)
    counts, written = list[Expr | None](), list[int | Expr | None]()
    for axis, rows in zip(row_axes(con), con.m, strict=True):
        near, far = inner.get(axis), outer.get(axis)
        counts.append(None if near is None else needed(nest.reader, near))
        all_of_it = rows if far is None else needed(nest.reader, far)
        written.append(None if near == far else all_of_it)
    nest.counts, nest.written = tuple(counts), tuple(written)


def tiles(nest: Nest) -> Expr:
    """Tiles of rows that are needed."""
    return T.truncdiv(math.prod(nest.needed) + (nest.tm - 1), nest.tm)


@dataclass(frozen=True, slots=True)
class Walk:
    """The rows of tiles that follow one another: each begins where the one before ends."""

    nest: Nest
    held: tuple[Buffer, ...]
    """By axis the places of a tile's rows, and of the row after them."""

    @staticmethod
    def of(nest: Nest) -> Walk:
        axes = range(len(nest.con.m))
        named = (buffer(nest.tm + 1, index_dtype(), f"row{d}", scope="local") for d in axes)
        return Walk(nest, tuple(named))

    def begin(self, tile: Expr) -> Stmt:
        """Before the first tile. The place of its first row is found by divisions."""
        total = math.prod(self.nest.needed[1:], start=self.nest.needed[0])
        first = divided(T.min(tile * self.nest.tm, total - 1), self.nest.needed)
        return seq([*map(stack, self.held), *self._keep(imm(self.nest.tm), first)])

    def rows(self, tile: Expr) -> Rows:
        """Of the next tile. Behind the last row that is needed it is that row once more."""
        tm, extents = self.nest.tm, self.nest.needed
        total = math.prod(extents[1:], start=extents[0])
        one, none = T.const(1, index_dtype()), T.const(0, index_dtype())

        def following(i: Expr) -> Stmt:
            carry: Expr = T.Select(tile * tm + i + 1 < total, one, none)
            stmts: list[Stmt] = []
            for d in reversed(range(1, len(extents))):
                place, over = index_var(f"at{d}"), index_var(f"over{d}")
                stmts += [
                    S.Bind(place, self.held[d][i] + carry),
                    S.Bind(over, T.Select(place >= extents[d], one, none)),
                    store(self.held[d], i + 1, T.Select(place >= extents[d], none, place)),
                ]
                carry = over
            return seq([*stmts, store(self.held[0], i + 1, self.held[0][i] + carry)])

        last = tuple(buf[imm(tm)] for buf in self.held)
        bind = seq([*self._keep(imm(0), last), loop(tm, following, UNROLLED, "i")])
        return Rows(
            lambda i: tuple(buf[i] for buf in self.held), lambda i: tile * tm + i < total, bind
        )

    def _keep(self, i: Expr, index: Index) -> list[Stmt]:
        return [store(buf, i, place) for buf, place in zip(self.held, index, strict=True)]


def write_masked(
    nest: Nest, g: Expr, nb: Expr, vectors: int, chunk: Expr, chunks: int
) -> Stmt | None:
    """What is written of a column panel where the sums are masked; lines in turns with other
    chunks."""
    apart = [d for d, count in enumerate(nest.written) if count is not None]
    if not nest.compact or not apart:
        return None
    inner = nest.needed
    written = [n if w is None else w for n, w in zip(inner, nest.written, strict=True)]
    one, zero = replace(nest, tm=1), T.const(0, nest.con.acc_dtype)
    acc = buffer(nest.bn, nest.con.acc_dtype, "masked", scope="local")

    def position(row: Index) -> Stmt:
        place = TilePosition(g, nb, vectors, imm(0), imm(0), (imm(0), 1), imm(0))
        return write_tile(one, place, Rows(lambda _: row), acc)

    def line(at: Index) -> Stmt:
        inside = [at[d] < inner[d] for d in apart if d < len(at)]
        begin: int | Expr = inner[-1]
        begin = (
            T.Select(T.all(*inside), imm(begin) if isinstance(begin, int) else begin, imm(0))
            if inside
            else begin
        )
        return loop(written[-1] - begin, lambda j: position((*at, begin + j)), name="j")

    def clear(j: Expr) -> Stmt:
        return loop(nest.vl, lambda v: store(acc, j * nest.vl + v, zero), VECTORIZED, "v")

    lines = math.prod(written[1:-1], start=written[0])
    own = T.truncdiv(lines + (chunks - 1) - chunk, imm(chunks))
    clearing = loop(vectors, clear, UNROLLED, "j")
    passing = loop(own, lambda t: line(divided(t * chunks + chunk, written[:-1])), name="line")
    return seq([stack(acc), clearing, passing])
