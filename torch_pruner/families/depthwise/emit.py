"""Emits depthwise and grouped convolutions: vectors of channels, tiles of output positions.

Transposed ones of each channel for itself, too: an input with zeros between its elements.

The nest is: parallel over chunks of lines; lines, channel blocks and strips in the order that the
decisions ask for; kernel offsets; register tile. The tile is ``th`` lines by ``tw`` columns by
``nv`` vectors of channels. Nothing is copied: the strips that touch the left or right border are
emitted apart with the offsets that lie inside, lines outside the input are skipped by a branch.
Vectors of a group's channels want all of its input channels, one after another: each element of
one is broadcast to all sums that share it.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from torch_pruner.codegen.parts.beyond import behind, row_counts
from torch_pruner.codegen.parts.channels import Channels, channel_blocks
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import second_index
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    Stmt,
    T,
    buffer,
    enclosed,
    loop,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.values import load, store, value_dtype
from torch_pruner.families.depthwise.form import first_read, readers
from torch_pruner.families.depthwise.nest import Nest, Strip, strips_of
from torch_pruner.graph.contraction import contraction_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_pruner.families.depthwise.form import DepthwiseDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

# Output lines of a tile that want an input line, each with the offsets that precede the last.
Wanted: TypeAlias = "Sequence[tuple[int, Index]]"

_LANES = (VECTORIZED, "v")


def emit(spec: Graph, decisions: DepthwiseDecisions[int], signature: Signature) -> Emitted:
    """TIR for a depthwise convolution."""
    con = contraction_of(spec)
    assert con.conv is not None
    inputs, (out,), scratch = parameters(signature)
    packed = [b for b, p in zip(inputs, signature.packs, strict=True) if p is not None]
    weights = (packed or scratch)[0]
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    vl, tw, th, nv, chunks, order, parallel = decisions
    kind = PARALLEL if parallel else SERIAL
    counts = row_counts(spec, con, reader)
    nest = Nest(spec, con, con.conv, reader, weights, out, vl, tw, th, nv, order, kind, counts)
    body = [] if packed else [_pack(nest)]
    return Emitted(seq([*body, _compute(nest, chunks)]), inputs, [out], scratch)


def _pack(nest: Nest) -> Stmt:
    """Weights in panels of one vector, for those that are not constant."""
    con, vl = nest.con, nest.vl

    def panel(lanes: int, p: Expr) -> Stmt:
        def weight(k: Expr, v: Expr) -> Stmt:
            channel, at = p * vl + v, unlinear(k, con.k)
            group = channel if con.form == "conv_transpose" else imm(0)
            column = imm(0) if con.form == "conv_transpose" else channel
            value = nest.reader.at(con.b, second_index(con, group, at, column))
            return store(nest.weights, (p * con.depth + k) * vl + v, value.astype(con.acc_dtype))

        return loop(con.depth, lambda k: loop(lanes, lambda v: weight(k, v), name="v"), name="k")

    whole, rest = divmod(nest.channels, vl)
    panels = [loop(whole, partial(panel, vl), name="p")] if whole else []
    return enclosed(seq([*panels, *([panel(rest, imm(whole))] if rest else [])]))


def _compute(nest: Nest, chunks: int) -> Stmt:
    parts, strips = list(channel_blocks(nest.channels, nest.vl, nest.nv)), list(strips_of(nest))
    lines = math.prod(nest.lines)
    per_chunk = -(-lines // min(chunks, lines))
    chunks = -(-lines // per_chunk)
    *outer, columns = nest.counts
    scales = [1] * (len(outer) - 1) + [nest.th if len(outer) > 1 else 1]

    def chunk(c: Expr, body: Callable[[Index], Stmt]) -> Stmt:
        def line(t: Expr) -> Stmt:
            at = c * per_chunk + t if all(n is None for n in nest.counts) else t * chunks + c
            index = unlinear(at, nest.lines)
            done = behind(body(index), [i * s for i, s in zip(index, scales, strict=True)], outer)
            return done if lines % per_chunk == 0 else when(at < lines, done)

        return loop(per_chunk, line, name="t")

    def tile(at: Index, part: Channels, q: Expr, s: Strip, o: Expr) -> Stmt:
        return behind(_tile(nest, at, part, q, s, o), [s.first + o * s.width], [columns])

    def along_line(at: Index, part: Channels, q: Expr) -> Stmt:
        return seq([loop(s.count, partial(tile, at, part, q, s), name="o") for s in strips])

    def blocks(part: Channels) -> Stmt:
        def task(p: Expr) -> Stmt:
            q, c = unlinear(p, (part.count, chunks))
            return chunk(c, lambda at: along_line(at, part, q))

        return loop(part.count * chunks, task, nest.kind, "p")

    def whole_line(at: Index) -> Stmt:
        if nest.order == 1:
            return seq([loop(p.count, partial(along_line, at, p), name="q") for p in parts])

        def strip(s: Strip) -> Stmt:
            def all_channels(o: Expr) -> Stmt:
                def block(part: Channels) -> Stmt:
                    return loop(part.count, lambda q: tile(at, part, q, s, o), name="q")

                return seq([block(part) for part in parts])

            return loop(s.count, all_channels, name="o")

        return seq([strip(s) for s in strips])

    if nest.order == 0:  # channels outside: the weights of a block stay in registers
        return seq([blocks(part) for part in parts])
    return loop(chunks, lambda c: chunk(c, whole_line), nest.kind, "p")


def _tile(nest: Nest, at: Index, part: Channels, q: Expr, strip: Strip, o: Expr) -> Stmt:
    """One register tile: all kernel offsets, then the epilogue."""
    con, conv = nest.con, nest.conv
    lanes, vectors = part.lanes, part.vectors
    grouped = not con.channelwise
    acc = buffer(nest.th * strip.width * vectors * lanes, con.acc_dtype, "acc", scope="local")
    image, *outer = at
    start = strip.first + o * strip.width
    begin = first_read(conv, -1, strip.first) + o * first_read(conv, -1, strip.width)
    channel = part.first + q * part.width
    group = T.floordiv(channel, imm(con.n))

    def place(h: int | Expr, i: Expr, j: Expr, v: Expr) -> Expr:
        return ((h * strip.width + i) * vectors + j) * lanes + v

    over, read = partial(_each, strip, part), readers(conv, -1, strip.width)

    def taps(line: Index, wanted: Wanted) -> Stmt:
        """An input line, column after column: each is read once, for all sums that want it.

        Kernel offset after offset instead, LLVM would keep what neighbouring offsets share and
        spill it, as sums take most of the registers.
        """

        def columns(*k: Expr) -> Stmt:  # of one input channel, where a group has several
            return seq([column(line, wanted, at, k) for at in read])

        return loop(con.k[-1], columns, name="k") if grouped else columns()

    def column(line: Index, wanted: Wanted, at: int, k: Index) -> Stmt:
        place_at = begin + at

        def vector(j: Expr) -> Stmt:
            return seq(
                [
                    loop(
                        lanes, partial(product, line, place_at, k, (h, offsets), reader, j), *_LANES
                    )
                    for h, offsets in wanted
                    for reader in read[at]
                ]
            )

        body = loop(vectors, vector, UNROLLED, "j")
        if strip.inside:
            return body
        return when(T.all(place_at >= 0, place_at < nest.extent[-1]), body)

    def product(
        line: Index,
        column: Expr,
        k: Index,
        which: tuple[int, Index],
        reader: tuple[int, int],
        j: Expr,
        v: Expr,
    ) -> Stmt:
        (h, offsets), (i, c) = which, reader
        source = group * con.k[-1] + k[0] if grouped else channel + j * lanes + v
        x = nest.reader.at(con.a, (image, source, *line, column))
        offset = linear((*offsets, imm(c), *k), con.k if grouped else conv.kernel)
        w = _weight(nest, part, q, offset, (j, v))
        here = place(h, imm(i), j, v)
        return store(acc, here, acc[here] + x.astype(con.acc_dtype) * w.astype(con.acc_dtype))

    zero = T.const(0, con.acc_dtype)

    def clear(h: int) -> Stmt:
        return over(lambda i, j, v: store(acc, place(h, i, j, v), zero))

    init = [clear(h) for h in range(nest.th)]
    write = [
        _write(nest, (image, channel, tuple(outer), start), (part, strip), acc, h, over, place)
        for h in range(nest.th)
    ]
    return seq([stack(acc), *init, *_lines(nest, outer, taps), *write])


def _each(strip: Strip, part: Channels, body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
    """A body of a column, a vector and a lane, for all of a line of the tile."""

    def vector(i: Expr, j: Expr) -> Stmt:
        return loop(part.lanes, lambda v: body(i, j, v), VECTORIZED, "v")

    def column(i: Expr) -> Stmt:
        return loop(part.vectors, lambda j: vector(i, j), UNROLLED, "j")

    return loop(strip.width, column, UNROLLED)


def _weight(nest: Nest, part: Channels, q: Expr, k: Expr, lane: tuple[Expr, Expr]) -> Expr:
    """The weight of position ``k`` of the reduction, for a vector of a block and a lane of it."""
    depth, (j, v) = nest.con.depth, lane
    if part.lanes < nest.vl:  # a part of the last panel
        at = part.first % nest.vl + q * part.lanes + v
        return load(nest.weights, (part.first // nest.vl * depth + k) * nest.vl + at)
    panel = part.first // nest.vl + q * part.vectors + j
    return load(nest.weights, (panel * depth + k) * nest.vl + v)


def _lines(nest: Nest, outer: list[Expr], taps: Callable[[Index, Wanted], Stmt]) -> Iterator[Stmt]:
    """Every input line that the tile reads, once, for all of the output lines that want it."""
    conv = nest.conv
    if not outer:
        yield taps((), [(0, ())])
        return
    if nest.th == 1:
        yield _line_by_line(nest, outer, taps)
        return
    last = (nest.con.m[-2] - 1) // nest.th  # tile
    step = first_read(conv, -2, nest.th)
    for far in itertools.product(*(range(k) for k in conv.kernel[:-2])):
        offsets = [imm(r) for r in far]
        found = [_place(nest, d, outer[d], r) for d, r in enumerate(offsets)]
        place, inside = [at for at, _ in found], [g for _, guards in found for g in guards]
        for y, wanted in readers(conv, -2, nest.th).items():
            line = outer[-1] * step + y
            body = taps((*place, line), [(h, (*offsets, imm(r))) for h, r in wanted])
            guards = list(inside)
            if y < 0:
                guards.append(line >= 0)
            if last * step + y >= nest.extent[-2]:
                guards.append(line < nest.extent[-2])
            yield when(T.all(*guards), body) if guards else body


def _place(nest: Nest, d: int, at: Expr, offset: Expr) -> tuple[Expr, list[Expr]]:
    """The position along dimension ``d`` of the input that output position ``at`` reads at a kernel
    offset, and what must hold for there to be one."""
    conv, extent = nest.conv, nest.extent[d]
    stride, dilation, lo = conv.stride[d], conv.dilation[d], conv.lo[d]
    apart, guards = conv.dilate_input[d], []
    place = at * stride + offset * dilation - lo
    if lo > 0:
        guards.append(place >= 0)
    highest = (nest.con.m[d + 1] - 1) * stride + (conv.kernel[d] - 1) * dilation - lo
    if apart > 1:
        guards.append(T.EQ(T.floormod(place, imm(apart)), 0))
        place = T.floordiv(place, imm(apart))
    if highest >= extent * apart:
        guards.append(place < extent)
    return place, guards


def _line_by_line(nest: Nest, outer: list[Expr], taps: Callable[[Index, Wanted], Stmt]) -> Stmt:
    """Loops over kernel lines for a tile of one output line; nothing is unrolled."""

    def visit(place: Index, offsets: Index) -> Stmt:
        d = len(offsets)
        if d == len(outer):
            return taps(place, [(0, offsets)])

        def line(r: Expr) -> Stmt:
            at, guards = _place(nest, d, outer[d], r)
            body = visit((*place, at), (*offsets, r))
            return when(T.all(*guards), body) if guards else body

        return loop(nest.conv.kernel[d], line, name="r")

    return visit((), ())


def _write(
    nest: Nest,
    where: tuple[Expr, Expr, Index, Expr],
    shape: tuple[Channels, Strip],
    acc: Buffer,
    h: int,
    over: Callable[[Callable[[Expr, Expr, Expr], Stmt]], Stmt],
    place: Callable[[int, Expr, Expr, Expr], Expr],
) -> Stmt:
    """The epilogue of one output line of the tile, stored once."""
    con, spec = nest.con, nest.spec
    image, channel, outer, start = where
    part, _ = shape
    path = output_path(spec, con.anchor)
    result = spec.nodes[path[-1]].shape
    dtype = value_dtype(spec.nodes[con.anchor].dtype)
    lines = (*outer[:-1], outer[-1] * nest.th + h) if outer else ()

    def element(i: Expr, j: Expr, v: Expr) -> Stmt:
        index = along(spec, path, (image, channel + j * part.lanes + v, *lines, start + i))
        nest.reader.overrides[con.anchor] = lambda _: acc[place(h, i, j, v)].astype(dtype)
        return nest.reader.scope(
            lambda: [store(nest.out, linear(index, result), nest.reader.at(path[-1], index))]
        )

    body = over(element)
    ragged = outer and con.m[-2] % nest.th
    return when(lines[-1] < con.m[-2], body) if ragged else body
