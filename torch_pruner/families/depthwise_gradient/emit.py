"""Emits gradients of depthwise weights from operands that lie channels last.

A register tile is some taps of a line of the kernel by some vectors of channels. Both operands are
read where they lie, a position at a time; where a line of the input ends before all taps do is
left to loops of their own. What a block of lines sums up is added to its chunk's sums in memory,
and those of all chunks in the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.channels import Channels, channel_blocks
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    enclosed,
    index_var,
    loop,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.families.depthwise_gradient.form import Lines, chunked, lines_of
from torch_pruner.graph.depthwise_gradient import DepthwiseGradient, gradient_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.depthwise_gradient.form import DepthwiseGradientDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


@dataclass(slots=True)
class _Nest:
    """Everything the parts of one emission share."""

    spec: Graph
    of: DepthwiseGradient
    lines: Lines
    reader: Reader
    sums: Buffer
    out: Buffer
    lb: int
    tc: int
    chunks: int
    each: int  # blocks of lines of a chunk
    stored: int  # channels of a line of ``sums``

    @property
    def extent(self) -> tuple[int, ...]:
        """Spatial extents of the convolution's input."""
        return self.spec.nodes[self.of.con.a].shape[2:]

    def sum_at(self, chunk: Expr, tap: Expr, channel: Expr) -> Expr:
        return linear((chunk, tap, channel), (self.chunks, math.prod(self.of.taps), self.stored))


@dataclass(frozen=True, slots=True)
class _Tile:
    """Channels from ``channel`` on, and ``taps`` taps from ``first`` of the kernel line ``row``."""

    part: Channels
    channel: Expr
    row: Index
    first: int
    taps: int


def emit(spec: Graph, decisions: DepthwiseGradientDecisions[int], signature: Signature) -> Emitted:
    """TIR for the gradient of a depthwise convolution's weights."""
    of = gradient_of(spec)
    assert of is not None
    inputs, (out,), scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    vl, nv, tc, lb, mc, parallel = decisions
    chunks, each = chunked(of, lb, mc)
    stored = signature.scratch[0].shape[-1]
    nest = _Nest(
        spec, of, lines_of(of), reader, scratch[0], out, lb, tc, chunks, each, stored
    )  # fmt: skip
    kind = PARALLEL if parallel else SERIAL
    parts = list(channel_blocks(of.channels, vl, nv))
    blocks = sum(p.count for p in parts)

    def task(p: Expr) -> Stmt:
        chunk, q = unlinear(p, (chunks, blocks))
        return _choose(parts, q, partial(_chunk, nest, chunk))

    singles = list(channel_blocks(of.channels, vl, 1))
    columns = sum(p.count for p in singles)
    added = loop(
        columns, lambda q: enclosed(_choose(singles, q, partial(_add_up, nest))), kind, "q"
    )
    return Emitted(seq([loop(chunks * blocks, task, kind, "p"), added]), inputs, [out], scratch)


def _choose(parts: list[Channels], q: Expr, body: Callable[[Channels, Expr], Stmt]) -> Stmt:
    """``body`` of the block of channels that is the ``q``-th of all parts."""
    part, *rest = parts
    here = body(part, part.first + q * part.width)
    if not rest:
        return here
    return when(q < part.count, here, _choose(rest, q - part.count, body))


def _each(part: Channels, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
    """A body of a vector and a lane."""

    def vector(j: Expr) -> Stmt:
        return loop(part.lanes, lambda v: body(j, v), VECTORIZED, "v")

    return loop(part.vectors, vector, UNROLLED, "j")


def _chunk(nest: _Nest, chunk: Expr, part: Channels, channel: Expr) -> Stmt:
    """All sums of a chunk, of a block of channels."""
    of, zero = nest.of, T.const(0, nest.of.con.acc_dtype)
    *rows, columns = of.taps
    blocks = -(-nest.lines.count // nest.lb)

    def clear(tap: Expr) -> Stmt:
        return _each(
            part,
            lambda j, v: store(
                nest.sums, nest.sum_at(chunk, tap, channel + j * part.lanes + v), zero
            ),
        )

    def row(b: Expr, r: Expr) -> Stmt:
        at = unlinear(r, tuple(rows)) if rows else ()
        tiles = [
            _Tile(part, channel, at, first, min(nest.tc, columns - first))
            for first in range(0, columns, nest.tc)
        ]
        return seq([_tile(nest, chunk, b, r * columns, tile) for tile in tiles])

    def block(t: Expr) -> Stmt:
        b = chunk * nest.each + t
        body = loop(math.prod(rows), lambda r: row(b, r), name="r")
        return body if blocks == nest.chunks * nest.each else when(b < blocks, body)

    cleared = loop(math.prod(of.taps), clear, name="tap")
    return seq([cleared, loop(nest.each, block, name="t")])


def _tile(nest: _Nest, chunk: Expr, b: Expr, tap: Expr, tile: _Tile) -> Stmt:
    """What a block of lines adds to the sums of a register tile."""
    part, dtype = tile.part, nest.of.con.acc_dtype
    acc = buffer(tile.taps * part.width, dtype, "acc", scope="local")

    def place(c: Expr, j: Expr, v: Expr) -> Expr:
        return (c * part.vectors + j) * part.lanes + v

    def over(body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
        return loop(tile.taps, lambda c: _each(part, partial(body, c)), UNROLLED, "c")

    def keep(c: Expr, j: Expr, v: Expr) -> Stmt:
        at = nest.sum_at(chunk, tap + tile.first + c, tile.channel + j * part.lanes + v)
        return store(nest.sums, at, nest.sums[at] + acc[place(c, j, v)])

    def line(n: Expr) -> Stmt:
        at = b * nest.lb + n
        body = _line(nest, at, acc, place, tile)
        return body if nest.lines.count % nest.lb == 0 else when(at < nest.lines.count, body)

    clear = over(lambda c, j, v: store(acc, place(c, j, v), T.const(0, dtype)))
    return seq([stack(acc), clear, loop(nest.lb, line, name="n"), over(keep)])


def _line(
    nest: _Nest,
    at: Expr,
    acc: Buffer,
    place: Callable[[Expr, Expr, Expr], Expr],
    tile: _Tile,
) -> Stmt:
    """The products of a line: positions at which some taps lie outside of the input apart."""
    of, lines, part = nest.of, nest.lines, tile.part
    conv, dtype = of.con.conv, of.con.acc_dtype
    assert conv is not None
    image, *outer, piece = unlinear(at, (*lines.outer, lines.pieces))
    above, guards = [], []
    for d, (p, r) in enumerate(zip(outer, tile.row, strict=True)):
        y = p * conv.dilation[d] + r * conv.stride[d] - conv.lo[d]
        last = (of.positions[d] - 1) * conv.dilation[d] + (of.taps[d] - 1) * conv.stride[d]
        guards += [y >= 0] if conv.lo[d] > 0 else []
        guards += [y < nest.extent[d]] if last - conv.lo[d] >= nest.extent[d] else []
        above.append(y)
    stride, dilation, lo, extent = conv.stride[-1], conv.dilation[-1], conv.lo[-1], nest.extent[-1]

    def position(checked: bool, w: Expr) -> Stmt:
        def tap(c: int) -> Stmt:
            column = w * dilation + ((tile.first + c) * stride - lo)

            def product(j: Expr, v: Expr) -> Stmt:
                channel, here = tile.channel + j * part.lanes + v, place(imm(c), j, v)
                x = nest.reader.at(of.x, _x_index(of, image, channel, (*above, column)))
                grad = nest.reader.at(of.con.b, _grad_index(of, image, channel, (*outer, w)))
                return store(acc, here, acc[here] + x.astype(dtype) * grad.astype(dtype))

            body = _each(part, product)
            return when(T.all(column >= 0, column < extent), body) if checked else body

        return seq([tap(c) for c in range(tile.taps)])

    # From the first position at which all taps lie inside to the first at which they do not.
    nearest, farthest = tile.first * stride - lo, (tile.first + tile.taps - 1) * stride - lo
    left = min(max(0, -(nearest // dilation)), lines.width)
    right = max(left, min(lines.width, (extent - 1 - farthest) // dilation + 1))
    begin = piece * lines.piece
    end = T.min(begin + lines.piece, imm(lines.width))
    spans = [(0, left, True), (left, right, False), (right, lines.width, True)]
    loops = [
        _between(lines, (begin, end), low, high, partial(position, checked))
        for low, high, checked in spans
        if low < high
    ]
    return when(T.all(*guards), seq(loops)) if guards else seq(loops)


def _between(
    lines: Lines, piece: tuple[Expr, Expr], low: int, high: int, body: Callable[[Expr], Stmt]
) -> Stmt:
    """A loop over the positions from ``low`` to ``high`` that are in a piece of a line."""
    if lines.pieces == 1:
        return loop(high - low, lambda w: body(low + w), name="w")
    start, count, w = (index_var(name) for name in ("start", "count", "w"))
    first = T.max(piece[0], imm(low))
    extent = T.max(T.min(piece[1], imm(high)) - start, imm(0))
    return seq(
        [S.Bind(start, first), S.Bind(count, extent), S.For(w, start, count, SERIAL, body(w))]
    )


def _x_index(of: DepthwiseGradient, image: Expr, channel: Expr, place: Index) -> Index:
    if of.con.form == "depthwise":
        return (imm(0), channel, *place)
    return (imm(0), channel, image, *place)


def _grad_index(of: DepthwiseGradient, image: Expr, channel: Expr, place: Index) -> Index:
    return (channel, image, *place)


def _add_up(nest: _Nest, part: Channels, channel: Expr) -> Stmt:
    """The sums of all chunks, and what becomes of them."""
    of, spec = nest.of, nest.spec
    anchor = of.con.anchor
    path = output_path(spec, anchor)
    result = spec.nodes[path[-1]].shape
    dtype = value_dtype(spec.nodes[anchor].dtype)
    total = buffer(part.lanes, of.con.acc_dtype, "total", scope="local")

    def lanes(body: Callable[[Expr], Stmt]) -> Stmt:
        return loop(part.lanes, body, VECTORIZED, "v")

    def tap(t: Expr) -> Stmt:
        def more(c: Expr) -> Stmt:
            return lanes(
                lambda v: store(total, v, total[v] + nest.sums[nest.sum_at(c, t, channel + v)])
            )

        def write(v: Expr) -> Stmt:
            index = along(spec, path, (imm(0), channel + v, *unlinear(t, of.taps)))
            nest.reader.overrides[anchor] = lambda _: total[v].astype(dtype)
            return nest.reader.scope(
                lambda: [store(nest.out, linear(index, result), nest.reader.at(path[-1], index))]
            )

        first = lanes(lambda v: store(total, v, nest.sums[nest.sum_at(imm(0), t, channel + v)]))
        rest = [loop(nest.chunks - 1, lambda c: more(c + 1), name="c")] if nest.chunks > 1 else []
        return seq([stack(total), first, *rest, lanes(write)])

    return loop(math.prod(of.taps), tap, name="tap")
