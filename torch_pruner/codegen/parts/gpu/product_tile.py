"""What kernels of products share, whatever multiplies: tiles copied to shared memory, sums written.

A turn of the reduction is ``depth`` positions. Neighbouring threads copy what lies together, along
the reduction or across it; where a tile keeps an element is the kernel's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu import asynchronous, early
from torch_pruner.codegen.parts.gpu.grid import Grid, Registers, in_blocks, spread
from torch_pruner.codegen.parts.gpu.operands import (
    Moved,
    columns_follow,
    first_operand,
    write_out,
)
from torch_pruner.codegen.parts.gpu.sweeps import together as neighbours
from torch_pruner.codegen.parts.operands import Nest, b_at
from torch_pruner.codegen.parts.output import output_path
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
    when,
)
from torch_pruner.codegen.tir.reader import Index, imm, unlinear
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.strided import common_width

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.parts.gpu.weights import Weights

ADDING = 256  # threads of a block that adds parts up


@dataclass(frozen=True, slots=True)
class Tile:
    """An operand's part of a turn in shared memory: ``lines`` rows or columns by ``depth``.

    ``at(line, position)`` is where an element is kept. ``across``: neighbouring threads copy
    neighbouring lines, else neighbouring positions; ``step``: how far apart such neighbours are
    kept, within what one instruction copies.
    """

    buffer: Buffer
    lines: int
    depth: int
    at: Callable[[Expr, Expr], Expr]
    across: bool
    step: int = 1


@dataclass(frozen=True, slots=True)
class Narrow:
    """Weights of few bits, and room for a chunk of them as what is multiplied."""

    weights: Weights
    halves: Registers


@dataclass(frozen=True, slots=True)
class Copies:
    """How tiles are filled. ``tensor``: for tensor cores, which take elements as they are;
    ``ahead``: asynchronously where operands allow it."""

    nest: Nest
    grid: Grid
    tensor: bool
    ahead: bool

    def rows(self, tile: Tile, g: Expr, block: Expr, tid: Expr, turn: Expr) -> Stmt:
        """Of the first operand: rows from ``block`` times ``tile.lines``, positions of ``turn``."""
        con, bm, bk, across = self.nest.con, tile.lines, tile.depth, tile.across
        moved = Moved(self.nest, con.a, tensor=self.tensor)
        reach = moved.reach((-2 if across else -1) if con.conv is None else 1)
        # What is computed on its way is computed in groups, too: a thread then writes neighbours.
        width = reach or (1 if moved.raw else moved.most)
        if across and con.conv is not None:
            width = 1  # of neighbours, some may lie outside
        width = common_width(width, *((bm, con.m[-1]) if across else (con.k[-1], bk)))
        wide = self.ahead and width == moved.most == reach

        def piece(item: Expr) -> Stmt:
            if across:
                position, row = T.floordiv(item, bm), T.floormod(item, bm)
            else:
                row, position = T.floordiv(item, bk), T.floormod(item, bk)
            m, k = block * bm + row, turn * bk + position
            first, index = unlinear(m, con.m), unlinear(k, con.k)
            inside, _ = first_operand(moved.nest, g, first, imm(0))
            at = tile.at(row, position)

            def put(v: Expr, value: Expr) -> Stmt:
                return moved.put(tile.buffer, at + v * tile.step, value)

            def value(v: Expr) -> Expr:
                rows = (*first[:-1], first[-1] + v) if across else first
                _, read = first_operand(moved.nest, g, rows, imm(0))
                return read(index if across else (*index[:-1], index[-1] + v))

            guards = [m < con.rows] if con.rows % bm else []
            guards += [k < con.depth] if con.depth % bk else []
            guards += inside(index)
            if wide:
                return asynchronous.copy((tile.buffer, at), value, width, guards, self.grid.host)
            return moved.lanes(width, put, value, guards)

        return spread(self.grid.threads, tid, bm * bk, piece, width=width)

    def columns(self, tile: Tile, g: Expr, block: Expr, tid: Expr, turn: Expr) -> Stmt:
        """Of the second operand: panel ``block``, where it is packed, else columns as above."""
        con, bn, bk, panel = self.nest.con, tile.lines, tile.depth, self.nest.panel
        moved = Moved(self.nest, con.b, tensor=self.tensor, packed=panel is not None)
        line = bn if tile.across else bk
        reach = moved.reach(-1 if tile.across else -2) if con.conv is None else 0
        reach = moved.most if panel is not None else reach
        extent = (bn if panel is not None else con.n) if tile.across else con.k[-1]
        width = common_width(max(reach, 1), line, extent)
        wide = self.ahead and moved.raw and width == moved.most == reach

        def piece(item: Expr) -> Stmt:
            outer, inner = T.floordiv(item, line), T.floormod(item, line)
            position, column = (outer, inner) if tile.across else (inner, outer)
            k, at = turn * bk + position, tile.at(column, position)

            def put(v: Expr, value: Expr) -> Stmt:
                return moved.put(tile.buffer, at + v, value)

            def value(v: Expr) -> Expr:
                if not tile.across:
                    *before, last = unlinear(k, con.k)
                    place = (*before, last + v)
                    return b_at(moved.nest, g, block, place, block * bn + column, column)
                lane = column + v
                if panel is not None and moved.raw:
                    start = (g * self.nest.blocks + block) * con.depth
                    return panel[(start + k) * bn + lane]
                return b_at(moved.nest, g, block, unlinear(k, con.k), block * bn + lane, lane)

            guards = [k < con.depth] if con.depth % bk else []
            guards += [block * bn + column < con.n] if con.n % bn and panel is None else []
            if wide:
                return asynchronous.copy((tile.buffer, at), value, width, guards, self.grid.host)
            return moved.lanes(width, put, value, guards)

        return spread(self.grid.threads, tid, bk * bn, piece, width=width)

    def ask_early(
        self, tile: Tile, g: Expr, block: Expr, tid: Expr, first: Expr, deep: int
    ) -> Stmt:
        """For the first tiles of a second operand that is read where it lies: see ``early``.

        ``deep`` positions of the reduction from ``first`` on, all of which there are; neighbours
        lie together by sixteen bytes.
        """
        con, bn = self.nest.con, tile.lines
        item = ITEMSIZE[self.nest.spec.nodes[con.b].dtype]
        moved = Moved(self.nest, con.b, tensor=self.tensor)

        def of_column(line: Expr) -> Stmt:
            column = block * bn + line
            column = T.min(column, imm(con.n - 1)) if con.n % bn else column
            place = b_at(moved.nest, g, block, unlinear(first, con.k), column, line)
            return early.ask_piece(place, deep * item)

        def of_position(line: Expr) -> Stmt:
            place = b_at(moved.nest, g, block, unlinear(first + line, con.k), block * bn, imm(0))
            asked = early.ask_piece(place, bn * item)
            return when((block + 1) * bn <= con.n, asked) if con.n % bn else asked

        if tile.across:
            return spread(self.grid.threads, tid, deep, of_position)
        return spread(self.grid.threads, tid, bn, of_column)

    def panel(self, tile: Tile, g: Expr, block: Expr, tid: Expr, turn: Expr) -> Stmt:
        """Of a packed second operand of whole turns: they lie in it as the tile keeps them."""
        con, panel, count = self.nest.con, self.nest.panel, tile.lines * tile.depth
        assert panel is not None
        moved = Moved(self.nest, con.b, tensor=self.tensor, packed=True)
        turns = in_blocks(con.depth, tile.depth)
        start = ((g * self.nest.blocks + block) * turns + turn) * count
        first = tile.at(imm(0), imm(0))
        width = common_width(moved.most, count)

        def piece(item: Expr) -> Stmt:
            def value(v: Expr) -> Expr:
                return panel[start + item + v]

            if self.ahead and width == moved.most:
                return asynchronous.copy(
                    (tile.buffer, first + item), value, width, [], self.grid.host
                )
            return moved.lanes(
                width, lambda v, value: moved.put(tile.buffer, first + item + v, value), value, []
            )

        return spread(self.grid.threads, tid, count, piece, width=width)

    def unpacked(
        self, narrow: Narrow, tile: Tile, g: Expr, block: Expr, tid: Expr, turn: Expr
    ) -> Stmt:
        """Of a second operand of few bits: columns of ``block`` become what is multiplied.

        The lines of the tile are columns. Where there is no column the last one is taken: nobody
        reads what comes of it.
        """
        weights, halves = narrow.weights, narrow.halves
        con, bk, chunk = self.nest.con, tile.depth, weights.chunk
        floats, none = weights.floats, imm(0)

        def piece(item: Expr) -> Stmt:
            line, position = T.floordiv(item, bk), T.floormod(item, bk)
            k, column, at = turn * bk + position, block * tile.lines + line, tile.at(line, position)
            column = T.min(column, imm(con.n - 1)) if con.n % tile.lines else column

            def halved(v: Expr) -> Stmt:
                value = floats.buffer[floats.at(tid, v)].astype(value_dtype(self._dtype))
                return store(halves.buffer, halves.at(tid, v), value)

            def put(v: Expr) -> Stmt:
                return S.BufferStore(tile.buffer, halves.buffer[halves.at(tid, v)], [at + v])

            def cleared(v: Expr) -> Stmt:
                zero = T.const(0, str(halves.buffer.dtype))
                return S.BufferStore(halves.buffer, zero, [halves.at(tid, v)])

            taken = seq(
                [
                    weights.ask(tid, none, g, column, k),
                    weights.unpack(tid, none, none, none),
                    loop(chunk, halved, UNROLLED, "v"),
                ]
            )
            if con.depth % bk:
                taken = S.IfThenElse(k < con.depth, taken, loop(chunk, cleared, UNROLLED, "v"))
            return seq([taken, loop(chunk, put, VECTORIZED, "v")])

        return spread(self.grid.threads, tid, tile.lines * bk, piece, width=chunk)

    @property
    def _dtype(self) -> str:
        """Of what is multiplied."""
        return self.nest.spec.nodes[self.nest.con.a].dtype


def write(
    nest: Nest,
    sums: Registers,
    tid: Expr,
    place: Callable[[Expr], Index],
    tile: tuple[int, int],
    part: tuple[Buffer, Expr] | None,
    *,
    together: int = 1,
) -> Stmt:
    """Every sum of a thread through the epilogue, but for those outside of the output.

    ``place(i)``: (group, row, column) of sum i, of a tile of so many rows and columns; ``together``
    sums are neighbours in a row, and are written at once where the output has them so. With
    ``part``, a buffer and a number, the sums are put down as they are, for ``add_up``.
    """
    con, spec = nest.con, nest.spec
    path = output_path(spec, con.anchor)
    width = common_width(together, con.n, tile[1])
    vectors = width > 1 and (part is not None or columns_follow(nest, path, width))

    def one(i: Expr) -> Stmt:
        g, m, n = place(i)
        guards = [m < con.rows] if con.rows % tile[0] else []
        guards += [n < con.n] if con.n % tile[1] else []

        def each(v: Expr) -> Stmt:
            at = sums.at(tid, i + v)
            if part is None:
                return write_out(nest, path, (g, m, n + v), sums.buffer, at)
            to = ((part[1] * con.groups + g) * con.rows + m) * con.n + n + v
            return store(part[0], to, sums.buffer[at])

        body = loop(width, each, neighbours(spec) if vectors else UNROLLED, "v")
        return S.IfThenElse(T.all(*guards), body, None) if guards else body

    return loop(sums.count // width, lambda i: one(i * width), UNROLLED, "sum")


def add_up(nest: Nest, parts: Buffer, split: int, *, host: bool) -> Stmt:
    """A launch of its own: the sums of all parts, through the epilogue."""
    con = nest.con
    total = con.groups * con.rows * con.n
    grid = Grid(in_blocks(total, ADDING), ADDING, host)
    whole = grid.registers(1, con.acc_dtype, "whole")
    path = output_path(nest.spec, con.anchor)

    def each(block: Expr, tid: Expr) -> Stmt:
        item, at = block * ADDING + tid, whole.at(tid, 0)

        def add(part: Expr) -> Stmt:
            return store(whole.buffer, at, whole.buffer[at] + parts[part * total + item])

        place = unlinear(item, (con.groups, con.rows, con.n))
        body = seq(
            [
                store(whole.buffer, at, T.const(0, con.acc_dtype)),
                loop(split, add, UNROLLED, "part"),
                write_out(nest, path, place, whole.buffer, at),
            ]
        )
        return S.IfThenElse(item < total, body, None) if total % ADDING else body

    return grid.launch(lambda block: grid.phases(lambda tid: each(block, tid)))
