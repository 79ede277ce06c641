"""The operands of a contraction as its tiles read them: in place, packed into panels, or padded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    Buffer,
    Expr,
    ForKind,
    Stmt,
    T,
    prefetch,
    seq,
    simplified,
)
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.values import load, value_dtype
from torch_pruner.graph.contraction import copied_shape
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.extents import Bounds
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.strided import Strided

STREAM_AHEAD = 4096


@dataclass(slots=True)
class Nest:
    """Everything the parts of one emission share."""

    spec: Graph
    con: Contraction
    reader: Reader
    vl: int
    tm: int
    nv: int
    ku: int
    parallel: bool
    ahead: bool  # fetch the next panel while this one is in use
    panel: Buffer | None  # packed second operand (given or made in the kernel)
    copied: Buffer | None  # first operand: padded, or as float32
    sums: Buffer | None  # of tiles, between blocks of the reduction
    out: Buffer
    kb: int = 1  # blocks of the reduction
    near: Buffer | None = None  # a block of a narrow panel as float32
    unwritten: Bounds = frozenset()  # of the contraction's result: nobody needs what it becomes
    unneeded: Bounds = frozenset()  # of the same: nobody needs it itself
    rows: Buffer | None = None  # first operand in tiles of rows: (group, tile, k, row)
    counts: tuple[Expr | None, ...] = ()  # of a convolution's rows, by axis: those that are needed
    written: tuple[int | Expr | None, ...] = ()  # by axis: whose results are, where that is more

    @property
    def compact(self) -> bool:
        """Whether tiles take rows that are needed alone, one after another across lines."""
        return any(n is not None for n in self.counts[1:])

    @property
    def needed(self) -> list[int | Expr]:
        """By axis how many rows are needed."""
        return [m if n is None else n for m, n in zip(self.con.m, self.counts, strict=True)]

    @property
    def block_depth(self) -> int:
        """Positions of the reduction in a block."""
        return self.con.depth // self.kb

    @property
    def kind(self) -> ForKind:
        """The kind of loops over tasks."""
        return PARALLEL if self.parallel else SERIAL

    @property
    def bn(self) -> int:
        return self.vl * self.nv

    @property
    def blocks(self) -> int:
        return -(-self.con.n // self.bn)

    @property
    def inner(self) -> tuple[int, ...]:
        """Extents of the reduction axes within a block."""
        k, blocks = self.con.k, self.kb
        if len(k) == 1:
            return (k[0] // blocks,)
        while blocks > 1:
            blocks, k = blocks // k[0], k[1:]
        return k

    @property
    def steps(self) -> int:
        """Unrolled steps of the reduction within a block."""
        *outer, last = self.inner
        return math.prod(outer) * (last // min(self.ku, last))

    @property
    def last_vectors(self) -> int:
        """Vectors of the last panel that hold columns."""
        return -(-(self.con.n - (self.blocks - 1) * self.bn) // self.vl)

    @property
    def tiles(self) -> int:
        return int(self.con.row_tiles(self.tm))


def row_at(nest: Nest, g: Expr, tile: Expr, i: Expr, k: Index) -> Expr:
    """Row ``i`` of a tile of the packed first operand."""
    assert nest.rows is not None
    base = (g * nest.tiles + tile) * nest.con.depth + linear(k, nest.con.k)
    return load(nest.rows, base * nest.tm + i)


def a_at(nest: Nest, g: Expr, row: Index, k: Index, column: Expr) -> Expr:
    con, conv = nest.con, nest.con.conv
    if conv is None and nest.copied is not None:
        return load(nest.copied, linear((g, *row, *k), copied_shape(nest.spec, con)))
    if conv is None:
        return nest.reader.at(con.a, (*unlinear(g, con.batch), *row, *k))
    if con.form == "depthwise":
        channel, offsets = T.min(column, imm(con.n - 1)) if con.n % nest.bn else column, k
    else:
        channel, offsets = g * con.k[-1] + k[-1], k[:-1]
    image, *place = row
    if con.form == "conv_phases":
        channel = k[-1]
        place = [q + late for q, (late, _) in zip(place, phase(con, g), strict=True)]
    at = tuple(
        o * s + r * d for o, s, r, d in zip(place, conv.stride, offsets, conv.dilation, strict=True)
    )
    if nest.copied is None:
        at = tuple(p - before if before else p for p, before in zip(at, conv.lo, strict=True))
        return nest.reader.at(con.a, (image, channel, *at))
    return load(nest.copied, linear((image, *at, channel), copied_shape(nest.spec, con)))


def phase(con: Contraction, g: Expr) -> list[tuple[Expr, Expr]]:
    """(first input position, output position modulo the stride) of phase ``g``, by dimension."""
    assert con.conv is not None
    return [
        (T.floordiv(h + p, s), T.floormod(2 * s - 1 - p - h, s))
        for h, p, s in zip(unlinear(g, con.batch), con.conv.phase, con.batch, strict=True)
    ]


def b_at(
    nest: Nest, g: Expr, nb: Expr, k: Index, column: Expr, lane: Expr, kb: Expr | None = None
) -> Expr:
    """``kb``: the block of the reduction that ``nest.near`` holds."""
    con = nest.con
    if nest.near is not None:
        assert kb is not None
        within = simplified(linear(k, con.k) - kb * nest.block_depth)
        return load(nest.near, within * nest.bn + lane)
    if nest.panel is not None:
        base = (g * nest.blocks + nb) * con.depth + linear(k, con.k)
        return load(nest.panel, base * nest.bn + lane)
    return second_operand(nest, g, k, column)


class Operands(Protocol):
    """What says where a contraction's operands are."""

    @property
    def spec(self) -> Graph: ...

    @property
    def con(self) -> Contraction: ...

    @property
    def reader(self) -> Reader: ...


def second_operand(nest: Operands, g: Expr, k: Index, column: Expr) -> Expr:
    """The second operand where the graph has it (not packed)."""
    con = nest.con
    if con.form == "conv_phases":
        *offsets, channel = k
        return _tap_of_phase(nest, g, offsets, (channel, column))
    return nest.reader.at(con.b, second_index(con, g, k, column))


def second_index(con: Contraction, g: Expr, k: Index, column: Expr) -> Index:
    """Index of an element of the second operand, whose phases are no axes."""
    if con.conv is None:
        return (*unlinear(g, con.batch), *k, column)
    if con.form == "depthwise":
        return (column, imm(0), *k)
    *offsets, channel = k
    if con.form == "conv_transpose":
        flipped = tuple(r - 1 - o for o, r in zip(offsets, con.conv.kernel, strict=True))
        return (g * con.k[-1] + channel, column, *flipped)
    return (g * con.n + column, channel, *offsets)


def element(place: Strided, index: Index) -> Expr:
    """The element of an input that lies at ``index`` of a view."""
    offset: Expr = imm(place.offset)
    for i, stride in zip(index, place.strides, strict=True):
        offset = offset + i * stride if stride else offset
    return offset


def _tap_of_phase(nest: Operands, g: Expr, offsets: list[Expr], pair: Index) -> Expr:
    """A weight of a strided transposed convolution; taps past the kernel are zeros."""
    con, node = nest.con, nest.spec.nodes[nest.con.b]
    counted = unlinear(g, con.batch)
    taps = [
        t * s - 1 - u * s - h
        for t, s, u, h in zip(con.k[:-1], con.batch, offsets, counted, strict=True)
    ]
    value = nest.reader.at(con.b, (*pair, *taps))
    real = [
        r < k
        for r, k, t, s in zip(taps, node.shape[2:], con.k[:-1], con.batch, strict=True)
        if t * s > k
    ]
    return (
        T.if_then_else(T.all(*real), value, T.const(0, value_dtype(node.dtype))) if real else value
    )


def panel_fetcher(
    nest: Nest, g: Expr, nb: Expr, kb: Expr, turn: tuple[Expr, int]
) -> Callable[[Expr], Stmt]:
    """Fetches a part of the next panel's block in every step of a tile, all of it in a block's.

    Weights come from memory or a far cache; while a tile is computed there is time to wait for
    them. A panel of one tile is no more than a part of a stream: see ``_stream_fetcher``.
    """
    con, panel = nest.con, nest.panel
    assert panel is not None
    if nest.tiles == 1:
        return _stream_fetcher(nest, g, nb, kb)
    line = 64 // ITEMSIZE[nest.spec.nodes[con.b].dtype]
    block = con.depth // nest.kb * nest.bn
    lines = -(-block // line)
    steps = nest.steps
    t, tiles = turn
    each = -(-lines // (steps * tiles))
    # Once all lines are there the rest of the tiles repeat the last of them, at next to no cost.
    base = T.min(t * (steps * each), imm(max(0, lines - steps * each)))
    following = ((g * nest.blocks + nb) * nest.kb + kb + 1) * block

    def fetch(step: Expr) -> Stmt:
        first = base + step * each
        return seq([prefetch(panel, following + (first + j) * line) for j in range(each)])

    return fetch


def _stream_fetcher(nest: Nest, g: Expr, nb: Expr, kb: Expr) -> Callable[[Expr], Stmt]:
    """Fetches what is read ``STREAM_AHEAD`` bytes later: each weight is used once, at one go.

    The more rows a tile has, the fewer of its loads fit the processor's window.
    """
    con, panel = nest.con, nest.panel
    assert panel is not None
    size = ITEMSIZE[nest.spec.nodes[con.b].dtype]
    line, step_length = 64 // size, min(nest.ku, con.k[-1]) * nest.bn
    block = con.depth // nest.kb * nest.bn
    start = ((g * nest.blocks + nb) * nest.kb + kb) * block + STREAM_AHEAD // size

    def fetch(step: Expr) -> Stmt:
        first = start + step * step_length
        return seq([prefetch(panel, first + at, once=True) for at in range(0, step_length, line)])

    return fetch
