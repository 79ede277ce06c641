"""Products of few rows: each column is the dot product of a line of weights with every row.

What takes the time is reading the weights. So threads that share a column, whole warps, read
neighbouring pieces of its line, ``ahead`` of each before they multiply any, and keep a sum for each
row. Sums are exchanged within a warp; what warps have goes through shared memory, from where as
many threads as there are results take them through the rest of the graph.

The first operand is read from memory, whose caches it does not leave; one that has to be computed
is put into shared memory first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.grid import WARP, Grid, Registers, in_blocks, spread
from torch_pruner.codegen.parts.gpu.lanes import exchanged
from torch_pruner.codegen.parts.gpu.operands import Moved, first_operand, write_out
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import Nest, second_operand
from torch_pruner.codegen.parts.output import output_path
from torch_pruner.codegen.tir.builders import (
    SERIAL,
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
from torch_pruner.codegen.tir.reader import Reader, imm, unlinear
from torch_pruner.codegen.tir.values import load, store
from torch_pruner.families.gpu_dots.form import gathered_bytes, vectors
from torch_pruner.graph.contraction import Contraction, contraction_of

if TYPE_CHECKING:
    from torch_pruner.families.gpu_dots.form import GpuDotsDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

DISTANCES = (16, 8, 4, 2, 1)  # of threads that exchange what they have, until a warp has all


@dataclass(slots=True)
class _Dots:
    """Everything the parts of one emission share."""

    con: Contraction
    nest: Nest
    grid: Grid
    decisions: GpuDotsDecisions[int]
    vl: int  # weights that a thread reads at once
    width: int  # elements of the first operand
    weights: Moved
    given: Moved
    gathered: Buffer | None = field(init=False)  # the first operand, where memory has it not
    words: Registers = field(init=False)  # weights that were asked for: (piece, column, element)
    values: Registers = field(init=False)  # of a row
    sums: Registers = field(init=False)  # (row, column)
    left: Buffer = field(init=False)  # what warps have: (columns together, warp, row, column)
    whole: Registers = field(init=False)

    def __post_init__(self) -> None:
        con, grid, d = self.con, self.grid, self.decisions
        self.gathered, dtype = None, self.given.dtype
        if gathered_bytes(self.nest.spec, con):
            dtype = self.nest.spec.nodes[con.a].dtype
            self.gathered = grid.shared(con.rows * con.depth, dtype, "gathered")
        self.words = grid.registers(d.ahead * d.columns * self.vl, self.weights.dtype, "words")
        self.values = grid.registers(self.vl, dtype, "values")
        self.sums = grid.registers(con.rows * d.columns, con.acc_dtype, "sums")
        count = self.together * self.units * self.sums.count
        self.left = grid.shared(count, con.acc_dtype, "left")
        self.whole = grid.registers(1, con.acc_dtype, "whole")

    @property
    def together(self) -> int:
        """Of a block: threads that share columns are so many times there."""
        return self.decisions.threads // self.decisions.along

    @property
    def own(self) -> int:
        """Columns of a block."""
        return self.together * self.decisions.columns

    @property
    def units(self) -> int:
        """Of those that share columns: warps, or threads where they exchange nothing."""
        return self.decisions.along if self.grid.host else self.decisions.along // WARP

    def lane(self, tid: Expr) -> Expr:
        """Among those that share columns."""
        return T.floormod(tid, self.decisions.along) if self.together > 1 else tid

    def which(self, tid: Expr) -> Expr:
        """Which columns of the block, by ``decisions.columns``."""
        return T.floordiv(tid, self.decisions.along) if self.together > 1 else imm(0)


def emit(
    spec: Graph,
    decisions: GpuDotsDecisions[int],
    signature: Signature,
    *,
    host: bool = False,
) -> Emitted:
    """TIR for a product."""
    con = contraction_of(spec)
    inputs, (out,), scratch = parameters(signature)
    constant = next((k for k, p in enumerate(signature.packs) if p is not None), None)
    panel = None if constant is None else inputs[constant]
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    nest = Nest(spec, con, reader, 1, 1, 1, 1, False, False, panel, None, None, out)
    tiles = in_blocks(con.n, decisions.threads // decisions.along * decisions.columns)
    grid = Grid(con.groups * tiles, decisions.threads, host)
    weights = Moved(nest, con.b, tensor=True, packed=panel is not None)
    given = Moved(nest, con.a, tensor=True)
    dots = _Dots(con, nest, grid, decisions, *vectors(spec, con), weights, given)

    def launched(number: Expr) -> Stmt:
        several = con.groups > 1
        g = T.floordiv(number, tiles) if several else imm(0)
        block = _Block(dots, g, T.floormod(number, tiles) if several else number)
        first = [] if dots.gathered is None else [block.gather]
        return grid.phases(*first, block.multiply, block.finish)

    return Emitted(grid.launch(launched), inputs, [out], scratch)


@dataclass(frozen=True, slots=True)
class _Block:
    """What a block computes: columns of a group."""

    dots: _Dots
    g: Expr
    tile: Expr

    def gather(self, tid: Expr) -> Stmt:
        """The first operand to shared memory."""
        dots, con = self.dots, self.dots.con
        into = dots.gathered
        assert into is not None

        def one(item: Expr) -> Stmt:
            row, k = T.floordiv(item, con.depth), T.floormod(item, con.depth)

            def emitted() -> list[Stmt]:
                _, read = first_operand(dots.nest, self.g, unlinear(row, con.m), imm(0))
                return [store(into, item, read((k,)))]

            return dots.nest.reader.scope(emitted)

        return spread(dots.grid.threads, tid, con.rows * con.depth, one)

    def multiply(self, tid: Expr) -> Stmt:
        """A thread's share of the sums of its columns, and those of its warp."""
        dots, d = self.dots, self.dots.decisions
        pieces = dots.con.depth // dots.vl
        whole, rest = divmod(pieces, d.along)
        lane = dots.lane(tid)

        def clear(i: Expr) -> Stmt:
            return store(dots.sums.buffer, dots.sums.at(tid, i), T.const(0, dots.con.acc_dtype))

        stmts = [loop(dots.sums.count, clear, UNROLLED, "sum")]
        if full := whole // d.ahead:
            stmts.append(
                loop(full, lambda r: self._some(tid, r * d.ahead, d.ahead), SERIAL, "round")
            )
        if whole % d.ahead:
            stmts.append(self._some(tid, imm(full * d.ahead), whole % d.ahead))
        if rest:
            stmts.append(when(lane < rest, self._some(tid, imm(whole), 1)))
        return seq([*stmts, *self._leave(tid)])

    def _some(self, tid: Expr, first: Expr, count: int) -> Stmt:
        """``count`` pieces of each column's weights, ``along`` pieces apart, and their products."""
        dots, d, vl = self.dots, self.dots.decisions, self.dots.vl
        words = dots.words

        def position(u: Expr) -> Expr:
            return ((first + u) * d.along + dots.lane(tid)) * vl

        def asked(u: Expr) -> Stmt:
            def of_column(c: Expr) -> Stmt:
                def one(v: Expr) -> Stmt:
                    value = self._weight(self._column(tid, c), position(u) + v)
                    at = words.at(tid, (u * d.columns + c) * vl + v)
                    return S.BufferStore(words.buffer, value, [at])

                return loop(vl, one, VECTORIZED, "v")

            return loop(d.columns, of_column, UNROLLED, "column")

        def multiplied(u: Expr) -> Stmt:
            first_word = u * (d.columns * vl)
            return loop(
                dots.con.rows,
                lambda m: self._row(tid, m, position(u), first_word),
                UNROLLED,
                "row",
            )

        return seq([loop(count, do, UNROLLED, "piece") for do in (asked, multiplied)])

    def _row(self, tid: Expr, m: Expr, position: Expr, first_word: Expr) -> Stmt:
        """Elements of a row from ``position`` on, times the weights from ``first_word`` on."""
        dots, columns, width = self.dots, self.dots.decisions.columns, self.dots.width
        values, words, sums = dots.values, dots.words, dots.sums

        def part(p: Expr) -> Stmt:
            def one(v: Expr) -> Stmt:
                at = p * width + v
                value = self._given(m, position + at)
                return S.BufferStore(values.buffer, value, [values.at(tid, at)])

            return loop(width, one, VECTORIZED, "v")

        def add(c: Expr) -> Stmt:
            at = sums.at(tid, m * columns + c)

            def one(v: Expr) -> Stmt:
                word = words.at(tid, first_word + c * dots.vl + v)
                factors = (load(values.buffer, values.at(tid, v)), load(words.buffer, word))
                own, weight = (f.astype(dots.con.acc_dtype) for f in factors)
                return store(sums.buffer, at, sums.buffer[at] + own * weight)

            return loop(dots.vl, one, UNROLLED, "v")

        read = loop(dots.vl // width, part, UNROLLED, "part")
        return seq([read, loop(columns, add, UNROLLED, "column")])

    def _column(self, tid: Expr, c: Expr) -> Expr:
        return (
            self.tile * self.dots.together + self.dots.which(tid)
        ) * self.dots.decisions.columns + c

    def _weight(self, column: Expr, k: Expr) -> Expr:
        """As it lies; of the last column, where there is none."""
        con, nest = self.dots.con, self.dots.weights.nest
        column = T.min(column, imm(con.n - 1)) if con.n % self.dots.own else column
        if nest.panel is not None:
            return nest.panel[(self.g * con.n + column) * con.depth + k]
        return second_operand(nest, self.g, (k,), column)

    def _given(self, m: Expr, k: Expr) -> Expr:
        """As it lies."""
        dots = self.dots
        if dots.gathered is not None:
            return dots.gathered[m * dots.con.depth + k]
        _, read = first_operand(dots.given.nest, self.g, unlinear(m, dots.con.m), imm(0))
        return read((k,))

    def _leave(self, tid: Expr) -> list[Stmt]:
        """What the warp has, for those that add up; on the host, what the thread has."""
        dots, sums = self.dots, self.dots.sums

        def take_in(distance: int) -> Stmt:
            def one(i: Expr) -> Stmt:
                at = sums.at(tid, i)
                binds, own, other = exchanged(sums.buffer[at], dots.con.acc_dtype, distance)
                return seq([*binds, store(sums.buffer, at, own + other)])

            return loop(sums.count, one, UNROLLED, "sum")

        def leave(i: Expr) -> Stmt:
            return store(dots.left, unit * sums.count + i, sums.buffer[sums.at(tid, i)])

        unit = tid if dots.grid.host else T.floordiv(tid, WARP)
        left = loop(sums.count, leave, UNROLLED, "sum")
        if dots.grid.host:
            return [left]
        return [*map(take_in, DISTANCES), when(T.EQ(T.floormod(tid, WARP), imm(0)), left)]

    def finish(self, tid: Expr) -> Stmt:
        """Results, neighbours to neighbouring threads, through the rest of the graph."""
        dots, con, columns = self.dots, self.dots.con, self.dots.decisions.columns
        path = output_path(dots.nest.spec, con.anchor)
        whole, at = dots.whole.buffer, dots.whole.at(tid, 0)

        def one(item: Expr) -> Stmt:
            m, near = T.floordiv(item, dots.own), T.floormod(item, dots.own)
            which, c = T.floordiv(near, columns), T.floormod(near, columns)
            column = self.tile * dots.own + near

            def add(unit: Expr) -> Stmt:
                place = (which * dots.units + unit) * dots.sums.count + m * columns + c
                return store(whole, at, whole[at] + dots.left[place])

            stmts = [
                store(whole, at, T.const(0, con.acc_dtype)),
                loop(dots.units, add, SERIAL, "unit"),
                write_out(dots.nest, path, (self.g, m, column), whole, at),
            ]
            body = seq(stmts)
            return when(column < con.n, body) if con.n % dots.own else body

        return spread(dots.grid.threads, tid, con.rows * dots.own, one)
