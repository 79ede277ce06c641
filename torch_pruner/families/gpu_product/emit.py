"""Matmul and convolution on GPUs: tiles in shared memory, sums in registers, fused epilogues.

A block computes ``bm`` rows by ``bn`` columns of one group, ``bk`` positions of the reduction at a
time: its threads copy both operands' tiles to shared memory and multiply from there, on CUDA cores
(``tm`` by ``tn`` sums per thread) or in tensor cores (``tm`` by ``tn`` sums per warp). With two
stages the next tiles are copied while these are multiplied. Convolutions are the same product,
their rows positions of the output, and read their input where it lies: what is outside is zero. The
rest of the graph is computed on the sums in registers before the one store.

Where there are too few tiles for a card, ``split`` blocks share one, each with its part of the
reduction; a second launch adds their sums up and computes the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu import asynchronous, product_tile, tensor_core
from torch_pruner.codegen.parts.gpu.grid import WARP, Grid, Registers, in_blocks
from torch_pruner.codegen.parts.gpu.product_tile import Copies, Narrow, Tile
from torch_pruner.codegen.parts.gpu.weights import CHUNK
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import Nest
from torch_pruner.codegen.tir.builders import SERIAL, UNROLLED, Buffer, Expr, S, Stmt, T, loop, seq
from torch_pruner.codegen.tir.reader import Index, Reader, imm, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.gpu_dots.emit import weights_of
from torch_pruner.families.gpu_dots.form import vectors
from torch_pruner.families.gpu_product.form import FOURS, has_narrow_weights, in_fours
from torch_pruner.graph.adjacency import columns_apart, rows_together
from torch_pruner.graph.contraction import Contraction, contraction_of
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.gpu_product.form import GpuProductDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

PAD = 8  # elements after each line of a tile: neighbouring lines then begin in other banks


@dataclass(slots=True)
class _Tiles:
    """Everything the parts of one emission share."""

    spec: Graph
    con: Contraction
    nest: Nest
    grid: Grid
    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    stages: int
    tensor: bool
    ahead: bool
    sums: Registers
    rows_turned: bool  # neighbouring threads copy rows of A; the lines of its tile are never rows
    columns_first: bool  # the lines of B's tile are columns
    fours: bool  # the lines of B's tile are all columns of four positions each
    split: int
    parts: Buffer | None  # sums of each part of the reduction
    narrow: Narrow | None  # weights of few bits, which become halves on their way
    a: Buffer = field(init=False)  # of all stages; made once their sizes are known
    b: Buffer = field(init=False)

    @property
    def a_line(self) -> int:
        """Distance of the lines of A's tile."""
        return self.bk + self._pad if self.rows_apart else self.bm + PAD

    @property
    def rows_apart(self) -> bool:
        """Whether the lines of A's tile are its rows."""
        return self.tensor and not self.rows_turned

    @property
    def b_line(self) -> int:
        if self.fours:
            return FOURS * self.bn
        return self.bk + self._pad if self.columns_first else self.bn + PAD

    @property
    def _pad(self) -> int:
        """After a line of k that tensor cores read: sixteen bytes, whatever an element has."""
        return PAD // 2 if ITEMSIZE[self.spec.nodes[self.con.a].dtype] == 4 else PAD

    @property
    def a_size(self) -> int:
        return (self.bm if self.rows_apart else self.bk) * self.a_line

    @property
    def b_size(self) -> int:
        if self.fours:
            return self.bk * self.bn
        return (self.bn if self.columns_first else self.bk) * self.b_line

    @property
    def turns(self) -> int:
        """The turns of one part of the reduction."""
        return in_blocks(self.con.depth, self.bk) // self.split

    def tile_a(self, turn: Expr) -> Tile:
        base, line, lines = _stage(self, turn, self.a_size), self.a_line, self.rows_apart

        def at(row: Expr, position: Expr) -> Expr:
            return base + (row * line + position if lines else position * line + row)

        step = 1 if self.rows_turned == (not lines) else line
        return Tile(self.a, self.bm, self.bk, at, self.rows_turned, step)

    def tile_b(self, turn: Expr) -> Tile:
        base, line, lines = _stage(self, turn, self.b_size), self.b_line, self.columns_first

        def at(column: Expr, position: Expr) -> Expr:
            if self.fours:
                fourth, own = T.floordiv(position, FOURS), T.floormod(position, FOURS)
                return base + fourth * line + column * FOURS + own
            return base + (column * line + position if lines else position * line + column)

        return Tile(self.b, self.bn, self.bk, at, not lines)

    def place(self, tid: Expr, i: Expr | int) -> tuple[Expr, Expr]:
        """(row, column) in the block's tile of sum ``i`` of a thread."""
        if self.tensor:
            across = self.bn // self.tn
            warp, lane = T.floordiv(tid, WARP), T.floormod(tid, WARP)
            row, column = tensor_core.place(lane, i, self.tn)
            first = T.floordiv(warp, across) * self.tm, T.floormod(warp, across) * self.tn
            return first[0] + row, first[1] + column
        across = self.bn // self.tn
        y, x = T.floordiv(tid, across), T.floormod(tid, across)
        r, c = T.floordiv(imm(0) + i, self.tn), T.floormod(imm(0) + i, self.tn)
        four = self.together  # a thread's columns lie together by fours
        column = T.floordiv(c, four) * (four * across) + x * four + T.floormod(c, four)
        return y * self.tm + r, column

    @property
    def together(self) -> int:
        """Sums of a thread that are neighbours in a row of the result."""
        if self.tensor:
            return tensor_core.NEIGHBOURS
        return 4 if self.tn % 4 == 0 else 1


def threads_of(decisions: GpuProductDecisions[int]) -> int:
    """Threads of a block."""
    tiles = (decisions.bm // decisions.tm) * (decisions.bn // decisions.tn)
    return tiles * (WARP if decisions.tensor else 1)


def emit(
    spec: Graph,
    decisions: GpuProductDecisions[int],
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
    bm, bn = decisions.bm, decisions.bn
    nest = Nest(spec, con, reader, bn, 1, 1, 1, False, False, panel, None, None, out)
    threads, tensor = threads_of(decisions), bool(decisions.tensor)
    split, tiled = decisions.split, in_blocks(con.rows, bm) * in_blocks(con.n, bn)
    grid = Grid(con.groups * tiled * split, threads, host)
    dtype = spec.nodes[con.a].dtype if tensor else con.acc_dtype
    narrow = narrow_weights(nest, inputs, grid)
    tiles = _Tiles(
        spec, con, nest, grid, bm, bn, decisions.bk, decisions.tm, decisions.tn,
        decisions.stages, tensor, bool(decisions.ahead),
        grid.registers(bm * bn // threads, con.acc_dtype, "sums"),
        rows_together(spec, con),
        narrow is not None or (tensor and panel is None and columns_apart(spec, con)),
        panel is not None and in_fours(spec, decisions),
        split, scratch[0] if scratch else None, narrow,
    )  # fmt: skip
    tiles.a = grid.shared(tiles.stages * tiles.a_size, dtype, "tile_a")
    tiles.b = grid.shared(tiles.stages * tiles.b_size, dtype, "tile_b")
    body = grid.launch(lambda b: _block(tiles, b))
    if tiles.parts is not None:
        body = seq([body, product_tile.add_up(nest, tiles.parts, split, host=host)])
    return Emitted(body, inputs, [out], scratch)


def narrow_weights(nest: Nest, inputs: Sequence[Buffer], grid: Grid) -> Narrow | None:
    """The second operand where it has few bits."""
    spec, con = nest.spec, nest.con
    if not has_narrow_weights(spec):
        return None
    weights = weights_of(nest, inputs, grid, min(vectors(spec, con)[0], CHUNK))
    return Narrow(weights, grid.registers(weights.chunk, spec.nodes[con.a].dtype, "halves"))


def _block(tiles: _Tiles, block: Expr) -> Stmt:
    con, grid, turns = tiles.con, tiles.grid, tiles.turns
    down, across = in_blocks(con.rows, tiles.bm), in_blocks(con.n, tiles.bn)
    g, mb, nb, part = unlinear(block, (con.groups, down, across, tiles.split))
    sums, before = tiles.sums, part * turns if tiles.split > 1 else imm(0)
    zero = T.const(0, con.acc_dtype)

    def clear(tid: Expr) -> Stmt:
        return loop(
            sums.count, lambda i: store(sums.buffer, sums.at(tid, i), zero), UNROLLED, "sum"
        )

    copies = Copies(tiles.nest, grid, tiles.tensor, tiles.ahead)

    def copy(tid: Expr, turn: Expr) -> Stmt:
        a, b = tiles.tile_a(turn), tiles.tile_b(turn)
        if tiles.narrow is not None:
            second = copies.unpacked(tiles.narrow, b, g, nb, tid, turn)
        else:
            columns = copies.panel if tiles.fours else copies.columns
            second = columns(b, g, nb, tid, turn)
        return seq([copies.rows(a, g, mb, tid, turn), second])

    def write(tid: Expr) -> Stmt:
        def place(i: Expr) -> Index:
            row, column = tiles.place(tid, i)
            return g, mb * tiles.bm + row, nb * tiles.bn + column

        into = None if tiles.parts is None else (tiles.parts, part)
        tile, together = (tiles.bm, tiles.bn), tiles.together
        return product_tile.write(tiles.nest, sums, tid, place, tile, into, together=together)

    if tiles.stages == 1:

        def turn(k: Expr) -> Stmt:
            at = before + k
            return grid.phases(
                lambda tid: copy(tid, at), lambda tid: _multiply(tiles, tid, at), first=False
            )

        return seq([grid.phases(clear), loop(turns, turn, name="turn"), grid.phases(write)])
    ahead, host = tiles.stages - 1, grid.host
    group = asynchronous.commit(host=host) if tiles.ahead else None

    def begin(tid: Expr) -> Stmt:
        copies = [
            s for k in range(ahead) for s in (copy(tid, before + k) if k < turns else None, group)
        ]
        return seq([clear(tid), *copies])

    def both(k: Expr) -> Stmt:
        def each(tid: Expr) -> Stmt:
            following = S.IfThenElse(k + ahead < turns, copy(tid, before + k + ahead), None)
            product = _multiply(tiles, tid, before + k)
            return seq([following if turns > ahead else None, group, product])

        arrived = asynchronous.wait(ahead - 1, host=host) if tiles.ahead else None
        return seq([arrived, grid.phases(each, first=False)])

    return seq([grid.phases(begin), loop(turns, both, name="turn"), grid.phases(write)])


def _stage(tiles: _Tiles, turn: Expr, size: int) -> Expr:
    return T.floormod(turn, tiles.stages) * size if tiles.stages > 1 else imm(0)


def _multiply(tiles: _Tiles, tid: Expr, turn: Expr) -> Stmt:
    bn, bk, sums = tiles.bn, tiles.bk, tiles.sums
    a_base, b_base = _stage(tiles, turn, tiles.a_size), _stage(tiles, turn, tiles.b_size)
    if tiles.tensor:
        warp, across = T.floordiv(tid, WARP), bn // tiles.tn
        first_row = T.floordiv(warp, across) * tiles.tm
        first_column = T.floormod(warp, across) * tiles.tn
        step_a = tiles.a_line if tiles.rows_apart else 1
        step_b = tiles.b_line if tiles.columns_first else FOURS if tiles.fours else 1
        return tensor_core.multiply(
            lambda i: sums.at(tid, i),
            sums.buffer,
            (tiles.a, a_base + first_row * step_a, tiles.a_line),
            (tiles.b, b_base + first_column * step_b, tiles.b_line),
            (tiles.tm, tiles.tn, bk),
            columns_first=tiles.columns_first,
            rows_turned=tiles.rows_turned,
            fours=tiles.fours,
            tid=tid,
            host=tiles.grid.host,
        )

    def step(k: Expr) -> Stmt:
        def one(i: Expr) -> Stmt:
            row, column = tiles.place(tid, i)
            x = tiles.a[a_base + k * tiles.a_line + row]
            y = tiles.b[b_base + k * tiles.b_line + column]
            at = sums.at(tid, i)
            return store(sums.buffer, at, sums.buffer[at] + x * y)

        return loop(sums.count, one, UNROLLED, "sum")

    return loop(bk, step, SERIAL, "k")
