"""Matmul and convolution on GPUs whose tensor cores read shared memory by themselves.

A block computes ``bm`` rows by ``bn`` columns of one group, ``bk`` positions of the reduction at a
time. Its ``warpgroups`` share the rows. Each turn begins its products and copies the tiles of a
later turn while tensor cores work; products of two turns are on their way at once, so tiles of
``stages`` - 2 turns are copied ahead. Packed operands arrive whole, asked for by one thread. With
``early`` the first weights come to the second cache before the kernels in front are done.
Convolutions, epilogues and parts of a reduction (``split``) are those of ``gpu_product``; parts may
also be added up in shared memory, by the blocks that have summed them up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu import (
    asynchronous,
    cluster,
    early,
    product_tile,
    warpgroup,
)
from torch_pruner.codegen.parts.gpu.bulk import Arrivals
from torch_pruner.codegen.parts.gpu.grid import Grid, Registers, Unshared, in_blocks
from torch_pruner.codegen.parts.gpu.product_tile import Copies, Tile
from torch_pruner.codegen.parts.gpu.warpgroup_shapes import ACROSS, PIECES, THREADS
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import Nest
from torch_pruner.codegen.tir.builders import UNROLLED, Buffer, Expr, S, Stmt, T, loop, seq, when
from torch_pruner.codegen.tir.reader import Index, Reader, imm, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.gpu_product.emit import narrow_weights
from torch_pruner.families.gpu_warpgroup.form import kinds
from torch_pruner.graph.contraction import Contraction, contraction_of
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.gpu_warpgroup.form import GpuWarpgroupDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

TOGETHER = 4  # sums of a thread that are neighbours in a row
SIDE = 8  # tiles one below another, of those that run at once
FLYING = 2  # turns whose products may be on their way


@dataclass(slots=True)
class _Block:
    """Everything the parts of one emission share."""

    con: Contraction
    nest: Nest
    grid: Grid
    decisions: GpuWarpgroupDecisions[int]
    kinds: tuple[int, int]  # how tiles are kept
    parts: Buffer | None  # sums of each part of the reduction
    narrow: product_tile.Narrow | None  # weights of few bits, which become halves on their way
    sums: Registers = field(init=False)
    a: Buffer = field(init=False)  # of all stages
    b: Buffer = field(init=False)
    arrivals: Arrivals | None = field(init=False)
    left: Buffer | None = field(init=False)  # sums, for other blocks of a cluster
    whole: Registers = field(init=False)  # of all blocks: four at a time, where there are several

    def __post_init__(self) -> None:
        d, grid, dtype = self.decisions, self.grid, self.nest.spec.nodes[self.con.a].dtype
        self.sums = grid.registers(d.bm * d.bn // grid.threads, self.con.acc_dtype, "sums")
        self.a = grid.shared(d.stages * d.bm * d.bk, dtype, "tile_a")
        self.b = grid.shared(d.stages * d.bn * d.bk, dtype, "tile_b")
        self.arrivals = Arrivals(grid, d.stages) if self.kinds[1] == PIECES else None
        self.left, self.whole = None, self.sums
        if d.cluster:
            self.left = grid.shared(d.bm * d.bn, self.con.acc_dtype, "left")
            self.whole = grid.registers(cluster.FOUR, self.con.acc_dtype, "whole")

    @property
    def turns(self) -> int:
        """The turns of one part of the reduction."""
        return in_blocks(self.con.depth, self.decisions.bk) // self.decisions.split

    @property
    def ahead(self) -> int:
        """How many turns ahead tiles are copied."""
        return self.decisions.stages - FLYING

    def first(self, turn: Expr, lines: int) -> Expr:
        """Where the tile of a turn begins."""
        return T.floormod(turn, self.decisions.stages) * (lines * self.decisions.bk)

    def tile(self, operand: int, turn: Expr) -> Tile:
        d, kind = self.decisions, self.kinds[operand]
        lines, buf = ((d.bm, self.a), (d.bn, self.b))[operand]
        first, at = self.first(turn, lines), warpgroup.kept(kind, lines, d.bk)
        return Tile(buf, lines, d.bk, lambda line, k: first + at(line, k), kind == ACROSS)


def emit(
    spec: Graph,
    decisions: GpuWarpgroupDecisions[int],
    signature: Signature,
    *,
    host: bool = False,
) -> Emitted:
    """TIR for a product."""
    con = contraction_of(spec)
    if host and decisions.cluster:  # there one block runs after the other
        decisions = decisions._replace(split=1, cluster=0)
    inputs, (out,), scratch = parameters(signature)
    constant = next((k for k, p in enumerate(signature.packs) if p is not None), None)
    panel = None if constant is None else inputs[constant]
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    nest = Nest(spec, con, reader, decisions.bn, 1, 1, 1, False, False, panel, None, None, out)
    tiles = in_blocks(con.rows, decisions.bm) * in_blocks(con.n, decisions.bn)
    blocks = con.groups * tiles * decisions.split
    grid = Grid(blocks, THREADS * decisions.warpgroups, host)
    held, narrow = kinds(spec, pack=panel is not None), narrow_weights(nest, inputs, grid)
    block = _Block(con, nest, grid, decisions, held, scratch[0] if scratch else None, narrow)
    body = grid.launch(lambda number: _launch(block, number))
    if block.parts is not None:
        body = seq([body, product_tile.add_up(nest, block.parts, decisions.split, host=host)])
    return Emitted(body, inputs, [out], scratch)


@dataclass(frozen=True, slots=True)
class _Place:
    """What a block computes: a tile of a group, and which part of the reduction."""

    block: _Block
    g: Expr
    down: Expr
    across: Expr
    part: Expr

    def copy(self, tid: Expr, turn: Expr) -> Stmt:
        """Both tiles of a turn, counted from the first of this part."""
        block, d = self.block, self.block.decisions
        at = self.part * block.turns + turn if d.split > 1 else turn
        copies = Copies(block.nest, block.grid, True, True)
        rows = copies.rows(block.tile(0, turn), self.g, self.down, tid, at)
        if block.narrow is not None:
            tile = block.tile(1, turn)
            columns = copies.unpacked(block.narrow, tile, self.g, self.across, tid, at)
            return seq([columns, rows])
        if block.arrivals is None:
            columns = copies.columns(block.tile(1, turn), self.g, self.across, tid, at)
            return seq([columns, rows])
        into = block.b, block.first(turn, d.bn)
        return seq([block.arrivals.copy(tid, turn, into, self.panel(at), d.bn * d.bk), rows])

    def panel(self, turn: Expr) -> tuple[Buffer, Expr]:
        """Where the packed operand has the tile of a turn, counted from the first of all parts."""
        block, d, panel = self.block, self.block.decisions, self.block.nest.panel
        assert panel is not None  # that is why it arrives whole
        panels = in_blocks(block.con.n, d.bn)
        start = (self.g * panels + self.across) * (block.turns * d.split) + turn
        return panel, start * (d.bn * d.bk)

    def ask_early(self, tid: Expr) -> Stmt:
        """Barriers for what arrives whole, and the first weights to the second cache."""
        block, d = self.block, self.block.decisions
        turns, first = min(block.ahead, block.turns), self.part * block.turns
        if block.arrivals is None:
            last = (d.split - 1) * block.turns * d.bk  # where the last part begins
            deep = min(turns * d.bk, block.con.depth - last)
            tile, copies = block.tile(1, imm(0)), Copies(block.nest, block.grid, True, True)
            asked = copies.ask_early(tile, self.g, self.across, tid, first * d.bk, deep)
            return seq([asked, early.ended()])
        panel, start = self.panel(first)  # tiles lie one after another
        nbytes = turns * d.bn * d.bk * ITEMSIZE[block.nest.spec.nodes[block.con.b].dtype]
        asked = when(T.EQ(tid, imm(0)), early.ask_piece(panel[start], nbytes))
        return seq([asked, block.arrivals.begin(tid), early.ended()])

    def begin(self, tid: Expr) -> Stmt:
        """No sums yet, and the first tiles on their way."""
        sums, host, turns = self.block.sums, self.block.grid.host, self.block.turns
        zero = T.const(0, self.block.con.acc_dtype)

        def clear(i: Expr) -> Stmt:
            return store(sums.buffer, sums.at(tid, i), zero)

        copies: list[Stmt | None] = []
        for k in range(self.block.ahead):
            copies += [
                self.copy(tid, imm(k)) if k < turns else None,
                asynchronous.commit(host=host),
            ]
        cleared = loop(sums.count, clear, UNROLLED, "sum")
        return seq([cleared, warpgroup.hold(sums, tid, host=host), *copies])

    def turn(self, k: Expr) -> Stmt:
        """Begin the products of turn ``k``, then the copies of a later one."""
        block, d, host = self.block, self.block.decisions, self.block.grid.host

        def each(tid: Expr) -> Stmt:
            product = warpgroup.multiply(
                block.sums,
                (block.a, block.first(k, d.bm), block.kinds[0]),
                (block.b, block.first(k, d.bn), block.kinds[1]),
                (d.bm, d.bm // d.warpgroups, d.bn, d.bk),
                tid=tid,
                host=host,
            )
            later, following = k + block.ahead, None
            if block.turns > block.ahead:
                following = S.IfThenElse(later < block.turns, self.copy(tid, later), None)
            done = warpgroup.wait(FLYING - 1, host=host)
            return seq([product, following, asynchronous.commit(host=host), done])

        arrived = [
            asynchronous.wait(block.ahead - 1, host=host),
            warpgroup.shown(host=host),
            block.arrivals.wait(k) if block.arrivals is not None else None,
        ]
        return seq([*arrived, block.grid.phases(each, first=False)])

    def write(self, tid: Expr) -> Stmt:
        block, d, host = self.block, self.block.decisions, self.block.grid.host
        sums, tile = block.sums, (d.bm, d.bn)

        def place(i: Expr) -> Index:
            row, column = warpgroup.place(tid, i, d.bn)
            first = T.floordiv(tid, THREADS) * (d.bm // d.warpgroups)
            return self.g, self.down * d.bm + first + row, self.across * d.bn + column

        into = None if block.parts is None else (block.parts, self.part)
        if block.left is not None:
            written = self._shared_out(tid, block.left, place)
        else:
            written = product_tile.write(
                block.nest, sums, tid, place, tile, into, together=TOGETHER
            )
        return seq(
            [
                warpgroup.wait(0, host=host),
                warpgroup.hold(sums, tid, host=host),
                warpgroup.gather(sums, tid, host=host),
                written,
            ]
        )

    def _shared_out(self, tid: Expr, left: Buffer, place: Callable[[Expr], Index]) -> Stmt:
        """The sums of all blocks of the cluster, each of which adds up and writes its share."""
        block, d = self.block, self.block.decisions
        sums, whole, threads = block.sums, block.whole, block.grid.threads
        fours = sums.count // cluster.FOUR

        def share(j: Expr) -> Stmt:
            four = j * d.split + self.part

            def at(i: Expr) -> Index:
                return place(four * cluster.FOUR + i)

            body = seq(
                [
                    cluster.add(whole.buffer, left, four, d.split, threads),
                    product_tile.write(
                        block.nest, whole, tid, at, (d.bm, d.bn), None, together=TOGETHER
                    ),
                ]
            )
            return S.IfThenElse(four < fours, body, None) if fours % d.split else body

        return seq(
            [
                cluster.leave(sums, left, threads, tid),
                cluster.meet(),
                loop(in_blocks(fours, d.split), share, name="share"),
                cluster.meet(),
            ]
        )


def _launch(block: _Block, number: Expr) -> Stmt:
    con, grid, d = block.con, block.grid, block.decisions
    down, across = in_blocks(con.rows, d.bm), in_blocks(con.n, d.bn)
    g, tile, part = unlinear(number, (con.groups, down * across, d.split))
    place = _Place(block, g, *_tile(tile, down, across), part)
    turns = loop(block.turns, place.turn, name="turn")
    before: list[Callable[[Expr], Stmt]] = []
    if d.early and not grid.host:
        before = [place.ask_early]
    elif block.arrivals is not None:
        before = [block.arrivals.begin]
    begin = place.begin if block.arrivals is not None else Unshared(place.begin)
    return seq([grid.phases(*before, begin), turns, grid.phases(place.write)])


def _tile(number: Expr, down: int, across: int) -> tuple[Expr, Expr]:
    """(row, column) of a tile. Blocks that run at once then read few rows and few columns.

    Tiles are counted down ``SIDE`` rows, then in the next column.
    """
    if down <= SIDE:
        return T.floormod(number, down), T.floordiv(number, down)
    strip, rest = T.floordiv(number, SIDE * across), T.floormod(number, SIDE * across)
    rows: Expr = imm(SIDE)
    if down % SIDE:
        rows = T.min(rows, down - strip * SIDE)
    return strip * SIDE + T.floormod(rest, rows), T.floordiv(rest, rows)
