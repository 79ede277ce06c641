"""What the two emitters for bfloat16 pairs share: operands, the walk over tiles, the reduction.

The nest is: parallel over tasks; column panels and row chunks of a task; row tiles; reduction; the
tile's epilogue. A tile that would reach past the last row starts earlier and computes some rows
again: they are stored twice with the same values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import element, phase
from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    UNROLLED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    loop,
    prefetch,
    seq,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.families.bf16_pairs.form import (
    COLUMNS,
    LINES,
    ROWS,
    WINDOWS,
    PairForm,
    pair_form,
)
from torch_pruner.families.bf16_pairs.panels import pack, pack_all
from torch_pruner.families.bf16_pairs.rows import copy_rows
from torch_pruner.families.bf16_pairs.turned import turn
from torch_pruner.families.bf16_pairs.windows import pad

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.bf16_pairs.form import PairDecisions
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

LINE = 64  # bytes


@dataclass(slots=True)
class PairNest:
    """Everything the parts of one emission share."""

    spec: Graph
    form: PairForm
    reader: Reader
    rows: int  # of one tile
    block: int  # columns of a panel
    ahead: bool
    panel: Buffer
    copy: Buffer | None
    out: Buffer
    sums: Buffer | None  # where tile registers are stored
    vl: int = COLUMNS  # lanes of a vector of words

    @property
    def con(self) -> Contraction:
        return self.form.con

    @property
    def tiles(self) -> int:
        return int(self.form.tiles(self.rows))

    @property
    def blocks(self) -> int:
        return -(-self.con.n // self.block)

    def first_row(self, tile: Expr) -> tuple[Expr, Expr]:
        """(run, first row in it) of a tile; the last tile of a run begins early enough.

        Of planes all taps come one after another: their results share lines of the cache.
        """
        runs, pieces = self.form.runs, -(-self.form.extent // self.rows)
        if self.form.planes is not None:
            piece, run = unlinear(tile, (pieces, runs))
        else:
            run, piece = unlinear(tile, (runs, pieces))
        if self.form.extent % self.rows == 0:
            return run, piece * self.rows
        return run, T.min(piece * self.rows, imm(self.form.extent - self.rows))

    def row_index(self, tile: Expr, i: Expr) -> Index:
        """Index of row ``i`` of a tile, by axes of rows."""
        run, first = self.first_row(tile)
        m = self.con.m
        if self.form.way == ROWS:
            return unlinear(first + i, m)
        if self.form.way in (WINDOWS, LINES):
            return (*unlinear(run, m[:-1]), first + i)
        return (first + i, *unlinear(run, m[1:]))

    def a_address(self, g: Expr, tile: Expr, i: Expr, outer: Index = ()) -> tuple[Buffer, Expr]:
        """Buffer and element at which row ``i`` of a tile of the first operand starts.

        ``outer``: the position on the outer axes of the reduction.
        """
        con, place, way = self.con, self.form.place, self.form.way
        row = self.row_index(tile, i)
        if place is not None and way == ROWS:
            index = (*unlinear(g, con.batch), *row, imm(0))
            return self.reader.buffers[place.source], element(place, index)
        if place is not None:
            return self.reader.buffers[place.source], element(place, self._window(g, row, outer))
        assert self.copy is not None
        if way == ROWS:
            return self.copy, (g * con.rows + linear(row, con.m)) * self.form.depth
        if way in (WINDOWS, LINES):
            image, channel, *at = self._window(g, row, outer)
            return self.copy, linear((image, *at, channel), self.form.copy)
        return self.copy, row[0] * self.form.copy[1] + self._tap(row[1:])

    def _window(self, g: Expr, row: Index, outer: Index) -> Index:
        """Index of the first channel of a window's offset, in the padded input."""
        con, conv = self.con, self.con.conv
        assert conv is not None
        image, *place = row
        channel = imm(0)
        if con.form == "conv_phases":
            place = [q + late for q, (late, _) in zip(place, phase(con, g), strict=True)]
        elif con.groups > 1:
            channel = g * con.k[-1]
        offsets = (*outer, imm(0)) if self.form.way == LINES else outer
        steps = zip(place, conv.stride, offsets, conv.dilation, strict=True)
        return (image, channel, *(p * s + r * d for p, s, r, d in steps))

    def _tap(self, taps: Index) -> Expr:
        """How far from a plane's first position a tap begins, its phase included."""
        conv, planes = self.con.conv, self.form.planes
        assert conv is not None
        assert planes is not None
        if planes.alone:
            return linear(taps, planes.phases) * planes.length
        found, plane = imm(0), []
        for t, d, s, p in zip(taps, conv.stride, conv.dilation, planes.pitch, strict=True):
            found = found + T.floordiv(t * d, s) * p
            plane.append(T.floormod(t * d, s) if s > 1 else imm(0))
        return found + linear(tuple(plane), planes.phases) * planes.length

    @property
    def a_stride(self) -> int:
        """Elements from one row of a tile of the first operand to the next."""
        form, con = self.form, self.con
        if form.planes is not None:
            return form.copy[1]
        if form.way == ROWS:
            return form.depth if form.place is None else form.place.strides[-2]
        assert con.conv is not None
        pitch = form.copy[-1] if form.place is None else form.place.strides[-1]
        return con.conv.stride[-1] * pitch

    def panel_at(self, g: Expr, nb: Expr, pair: Expr) -> Expr:
        """Element of the panel buffer where pair ``pair`` of column block ``nb`` starts."""
        return ((g * self.blocks + nb) * (self.form.depth // 2) + pair) * (self.block * self.width)

    @property
    def width(self) -> int:
        """Elements of the panel buffer in one pair: packed at run time they are whole words."""
        return 1 if str(self.panel.dtype) == "int32" else 2


def pair_nest(
    spec: Graph,
    family: str,
    signature: Signature,
    rows: int,
    block: int,
    decisions: PairDecisions[int],
) -> tuple[PairNest, Emitted]:
    """The nest of a kernel and the buffers of its emission, whose body is still empty."""
    form = pair_form(spec, family, decisions.way)
    inputs, (out,), scratch = parameters(signature)
    rest = list(scratch)
    sums = rest.pop() if family == "bf16_tiles" else None
    copy = rest.pop() if form.place is None else None
    constant = next((k for k, p in enumerate(signature.packs) if p is not None), None)
    panel = inputs[constant] if constant is not None else rest.pop()
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    ahead = bool(decisions.ahead) and constant is not None
    nest = PairNest(spec, form, reader, rows, block, ahead, panel, copy, out, sums)
    return nest, Emitted(S.Evaluate(imm(0)), inputs, [out], scratch)


def walk(
    nest: PairNest,
    decisions: PairDecisions[int],
    group: int,
    tile: Callable[[Expr, Expr, Expr, Expr, tuple[Expr, int]], Stmt],
    around: Callable[[Stmt], Stmt] = lambda body: body,
) -> Stmt:
    """The kernel: copies, then ``tile(task, g, nb, block of row tiles, turn)`` for all.

    ``group`` row tiles are computed together; ``turn`` is which of how many blocks of a panel it
    is; ``around`` wraps what one task does.
    """
    con = nest.con
    row_blocks = -(-nest.tiles // group)
    per_chunk = -(-row_blocks // min(decisions.mc, row_blocks))
    chunks = -(-row_blocks // per_chunk)
    units = con.groups * nest.blocks * chunks
    tasks = min(decisions.tasks, units)
    per_task = -(-units // tasks)
    tasks = -(-units // per_task)
    kind = PARALLEL if tasks > 1 else SERIAL

    def unit(p: Expr, at: Expr) -> Stmt:
        if decisions.order == 0:
            g, nb, chunk = unlinear(at, (con.groups, nest.blocks, chunks))
        else:
            g, chunk, nb = unlinear(at, (con.groups, chunks, nest.blocks))

        def row_block(t: Expr) -> Stmt:
            rb = chunk * per_chunk + t
            turn = (rb, row_blocks) if decisions.order == 0 else (t, per_chunk)
            body = tile(p, g, nb, rb, turn)
            return body if row_blocks % per_chunk == 0 else when(rb < row_blocks, body)

        here = nest.form.constant is None and not nest.form.packs_first
        packed = pack(nest, g, nb) if here else None
        return seq([packed, loop(per_chunk, row_block, name="t")])

    def task(p: Expr) -> Stmt:
        def step(u: Expr) -> Stmt:
            at = p * per_task + u
            return unit(p, at) if units % per_task == 0 else when(at < units, unit(p, at))

        return around(loop(per_task, step, name="u"))

    copied = (
        None if nest.copy is None else (copy_rows, pad, pad, turn, turn)[nest.form.way](nest, kind)
    )
    packed = pack_all(nest, kind) if nest.form.packs_first else None
    return seq([copied, packed, loop(tasks, task, kind, name="p")])


def reduction(
    nest: PairNest,
    step: int,
    ku: int,
    fetch: Callable[[Expr], Stmt] | None,
    update: Callable[[Index, Expr, Expr], Stmt],
) -> Stmt:
    """The loops over the reduction in steps of ``step`` elements, of which ``ku`` are unrolled.

    ``update(outer, at, first)``: at which position of the outer axes, how many elements along the
    last axis, and along the whole reduction, a step begins. ``fetch``: see ``fetcher``.
    """
    steps, outer = nest.form.inner // step, nest.form.outer
    blocks, rest = divmod(steps, ku)

    def run(o: Expr) -> Stmt:
        index = unlinear(o, outer)

        def one(s: Expr) -> Stmt:
            return update(index, s * step, (o * steps + s) * step)

        def several(b: Expr) -> Stmt:
            fetched = fetch(o * blocks + b) if fetch else None
            return seq([fetched, loop(ku, lambda u: one(b * ku + u), UNROLLED, "u")])

        last = loop(rest, lambda u: one(blocks * ku + u), UNROLLED, "u") if rest else None
        return seq([loop(blocks, several, name="k"), last])

    return loop(math.prod(outer), run, name="o")


def fetches(nest: PairNest, step: int, ku: int) -> int:
    """How often ``reduction`` fetches."""
    return math.prod(nest.form.outer) * (nest.form.inner // step // ku)


def fetcher(
    nest: PairNest, g: Expr, nb: Expr, turn: tuple[Expr, int], steps: int
) -> Callable[[Expr], Stmt] | None:
    """Fetches a part of the next panel in each of ``steps`` steps of a turn, all in all turns."""
    if not nest.ahead:
        return None
    panel, per_line = nest.panel, LINE // 2
    lines = nest.form.depth * nest.block // per_line
    t, turns = turn
    each = -(-lines // (steps * turns))
    base = T.min(t * (steps * each), imm(max(0, lines - steps * each)))
    following = nest.panel_at(g, nb + 1, imm(0))

    def fetch(step: Expr) -> Stmt:
        first = base + step * each
        return seq([prefetch(panel, following + (first + j) * per_line) for j in range(each)])

    return fetch
