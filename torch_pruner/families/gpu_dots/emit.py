"""Products of few rows: each column is the dot product of a line of weights with every row.

What takes the time is reading the weights. So threads that share a column, whole warps, read
neighbouring pieces of its line, ``ahead`` of each before they multiply any, and keep a sum for each
row. Sums are exchanged within a warp; what warps have goes through shared memory, from where as
many threads as there are results take them through the rest of the graph. With ``early`` the first
of the weights are asked for before the kernels in front of this one are done.

The first operand is read from memory, whose caches it does not leave; one that has to be computed
is put into shared memory first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu import early
from torch_pruner.codegen.parts.gpu.grid import WARP, Grid, Registers, in_blocks, spread
from torch_pruner.codegen.parts.gpu.lanes import DISTANCES, exchanged
from torch_pruner.codegen.parts.gpu.operands import Moved, first_operand, write_out
from torch_pruner.codegen.parts.gpu.weights import Numbers, Weights, Words
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import Nest
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
from torch_pruner.families.gpu_dots.form import gathered_bytes, vectors, words_product
from torch_pruner.graph.contraction import Contraction, contraction_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.gpu_dots.form import GpuDotsDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


@dataclass(slots=True)
class _Dots:
    """Everything the parts of one emission share."""

    con: Contraction
    nest: Nest
    grid: Grid
    decisions: GpuDotsDecisions[int]
    vl: int  # weights that a thread reads at once
    width: int  # elements of the first operand
    weights: Weights  # those that were asked for: (piece, column)
    given: Moved
    gathered: Buffer | None = field(init=False)  # the first operand, where memory has it not
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
        self.values = grid.registers(self.weights.chunk, dtype, "values")
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
    vl, width = vectors(spec, con)
    weights = weights_of(nest, inputs, grid, vl, decisions.columns, decisions.ahead)
    given = Moved(nest, con.a, tensor=True)
    dots = _Dots(con, nest, grid, decisions, vl, min(width, weights.chunk), weights, given)

    def launched(number: Expr) -> Stmt:
        several = con.groups > 1
        g = T.floordiv(number, tiles) if several else imm(0)
        block = _Block(dots, g, T.floormod(number, tiles) if several else number)
        first = [] if dots.gathered is None else [block.gather]
        asked = grid.phases(block.ask_early) if decisions.early and not host else None
        return seq([asked, grid.phases(*first, block.multiply, block.finish)])

    return Emitted(grid.launch(launched), inputs, [out], scratch)


def weights_of(
    nest: Nest, inputs: Sequence[Buffer], grid: Grid, vl: int, columns: int = 1, ahead: int = 1
) -> Weights:
    """Pieces of ``vl`` weights, ``ahead`` of each of ``columns`` columns."""
    product = words_product(nest.spec)
    if product is None:
        return Numbers(nest, grid, vl, columns, ahead)
    operands = [inputs[i] for i, _ in product.operands]
    kind = product.bits, product.group
    return Words(nest.con, kind, operands, grid, vl, columns, ahead)


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
        (whole, rest), lane = self._turns(), dots.lane(tid)

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

    def ask_early(self, tid: Expr) -> Stmt:
        """The first weights that each thread takes, before the kernel waits for those in front."""
        dots, d = self.dots, self.dots.decisions

        def of_piece(u: Expr) -> Stmt:
            def of_column(c: Expr) -> Stmt:
                column = self._column(tid, c)
                return dots.weights.ask_early(self.g, column, self._position(tid, u))

            return loop(d.columns, of_column, UNROLLED, "column")

        count = min(d.ahead, self._turns()[0])
        return seq([loop(count, of_piece, UNROLLED, "piece"), early.ended()])

    def _turns(self) -> tuple[int, int]:
        """How many pieces of a column each thread has, and how many threads have one more."""
        return divmod(self.dots.con.depth // self.dots.vl, self.dots.decisions.along)

    def _position(self, tid: Expr, turn: Expr) -> Expr:
        """Along the reduction, of a thread's piece."""
        dots = self.dots
        return (turn * dots.decisions.along + dots.lane(tid)) * dots.vl

    def _some(self, tid: Expr, first: Expr, count: int) -> Stmt:
        """``count`` pieces of each column's weights, ``along`` pieces apart, and their products."""
        dots, d = self.dots, self.dots.decisions
        weights, rows, chunk = dots.weights, dots.con.rows, dots.weights.chunk

        def position(u: Expr) -> Expr:
            return self._position(tid, first + u)

        def asked(u: Expr) -> Stmt:
            def of_column(c: Expr) -> Stmt:
                slot, column = u * d.columns + c, self._column(tid, c)
                return weights.ask(tid, slot, self.g, column, position(u))

            return loop(d.columns, of_column, UNROLLED, "column")

        def multiplied(u: Expr) -> Stmt:
            def of_chunk(n: Expr) -> Stmt:
                at = n * chunk

                def unpacked(c: Expr) -> Stmt:
                    return weights.unpack(tid, u * d.columns + c, at, c)

                def of_row(m: Expr) -> Stmt:
                    return self._row(tid, m, position(u) + at)

                columns = loop(d.columns, unpacked, UNROLLED, "column")
                return seq([columns, loop(rows, of_row, UNROLLED, "row")])

            return loop(dots.vl // chunk, of_chunk, UNROLLED, "chunk")

        return seq([loop(count, do, UNROLLED, "piece") for do in (asked, multiplied)])

    def _row(self, tid: Expr, m: Expr, position: Expr) -> Stmt:
        """Elements of a row from ``position`` on, times a chunk of each column's weights."""
        dots, columns, width = self.dots, self.dots.decisions.columns, self.dots.width
        values, sums, chunk = dots.values, dots.sums, dots.weights.chunk
        floats = dots.weights.floats

        def part(p: Expr) -> Stmt:
            def one(v: Expr) -> Stmt:
                at = p * width + v
                value = self._given(m, position + at)
                return S.BufferStore(values.buffer, value, [values.at(tid, at)])

            return loop(width, one, VECTORIZED, "v")

        def add(c: Expr) -> Stmt:
            at = sums.at(tid, m * columns + c)

            def one(v: Expr) -> Stmt:
                own = load(values.buffer, values.at(tid, v)).astype(dots.con.acc_dtype)
                product = own * floats.buffer[floats.at(tid, c * chunk + v)]
                return store(sums.buffer, at, sums.buffer[at] + product)

            return loop(chunk, one, UNROLLED, "v")

        read = loop(chunk // width, part, UNROLLED, "part")
        return seq([read, loop(columns, add, UNROLLED, "column")])

    def _column(self, tid: Expr, c: Expr) -> Expr:
        """The last column, where there is none."""
        dots = self.dots
        which = self.tile * dots.together + dots.which(tid)
        column = which * dots.decisions.columns + c
        return T.min(column, imm(dots.con.n - 1)) if dots.con.n % dots.own else column

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
