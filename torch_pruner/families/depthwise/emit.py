"""Emits depthwise and grouped convolutions: vectors of channels, tiles of output positions.

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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from torch_pruner.codegen.parts.beyond import behind, row_counts
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    ForKind,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.values import load, store, value_dtype
from torch_pruner.graph.contraction import Contraction, ConvShape, contraction_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_pruner.families.depthwise.form import DepthwiseDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

# Output lines of a tile that want an input line, each with the offsets that precede the last.
Wanted: TypeAlias = "Sequence[tuple[int, Index]]"

_LANES = (VECTORIZED, "v")


@dataclass(slots=True)
class _Nest:
    """Everything the parts of one emission share."""

    spec: Graph
    con: Contraction
    conv: ConvShape
    reader: Reader
    weights: Buffer
    out: Buffer
    vl: int
    tw: int
    th: int
    nv: int
    order: int
    kind: ForKind  # of loops over tasks
    counts: tuple[Expr | None, ...]  # of images, lines and columns those that are needed

    @property
    def extent(self) -> tuple[int, ...]:
        """Spatial extents of the input."""
        return self.spec.nodes[self.con.a].shape[2:]

    @property
    def channels(self) -> int:
        """Output channels of all groups."""
        return self.con.groups * self.con.n

    @property
    def lines(self) -> tuple[int, ...]:
        """Images and tiles of output lines."""
        images, *outer, _ = self.con.m
        return (images, *outer[:-1], -(-outer[-1] // self.th)) if outer else (images,)


@dataclass(frozen=True, slots=True)
class _Channels:
    """``count`` blocks of ``vectors`` vectors of ``lanes`` channels, from channel ``first``."""

    first: int
    count: int
    vectors: int
    lanes: int


@dataclass(frozen=True, slots=True)
class _Strip:
    """``count`` strips of ``width`` output columns from column ``first``; ``inside`` the input."""

    first: int
    count: int
    width: int
    inside: bool


def emit(spec: Graph, decisions: DepthwiseDecisions[int], signature: Signature) -> Emitted:
    """TIR for a depthwise convolution."""
    con = contraction_of(spec)
    assert con.conv is not None
    inputs, (out,), scratch = parameters(signature)
    weights = next(b for b, p in zip(inputs, signature.packs, strict=True) if p is not None)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    vl, tw, th, nv, chunks, order, parallel = decisions
    kind = PARALLEL if parallel else SERIAL
    counts = row_counts(spec, con, reader)
    nest = _Nest(spec, con, con.conv, reader, weights, out, vl, tw, th, nv, order, kind, counts)
    return Emitted(_compute(nest, chunks), inputs, [out], scratch)


def _compute(nest: _Nest, chunks: int) -> Stmt:
    parts, strips = list(_parts(nest)), list(_strips(nest))
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

    def tile(at: Index, part: _Channels, q: Expr, s: _Strip, o: Expr) -> Stmt:
        return behind(_tile(nest, at, part, q, s, o), [s.first + o * s.width], [columns])

    def along_line(at: Index, part: _Channels, q: Expr) -> Stmt:
        return seq([loop(s.count, partial(tile, at, part, q, s), name="o") for s in strips])

    def blocks(part: _Channels) -> Stmt:
        def task(p: Expr) -> Stmt:
            q, c = unlinear(p, (part.count, chunks))
            return chunk(c, lambda at: along_line(at, part, q))

        return loop(part.count * chunks, task, nest.kind, "p")

    def whole_line(at: Index) -> Stmt:
        if nest.order == 1:
            return seq([loop(p.count, partial(along_line, at, p), name="q") for p in parts])

        def strip(s: _Strip) -> Stmt:
            def all_channels(o: Expr) -> Stmt:
                def block(part: _Channels) -> Stmt:
                    return loop(part.count, lambda q: tile(at, part, q, s, o), name="q")

                return seq([block(part) for part in parts])

            return loop(s.count, all_channels, name="o")

        return seq([strip(s) for s in strips])

    if nest.order == 0:  # channels outside: the weights of a block stay in registers
        return seq([blocks(part) for part in parts])
    return loop(chunks, lambda c: chunk(c, whole_line), nest.kind, "p")


def _parts(nest: _Nest) -> Iterator[_Channels]:
    """Whole blocks, the vectors that do not fill one, and single channels."""
    n, vl, nv = nest.channels, nest.vl, nest.nv
    whole, vectors = n // (vl * nv), n % (vl * nv) // vl
    if whole:
        yield _Channels(0, whole, nv, vl)
    if vectors:
        yield _Channels(whole * vl * nv, 1, vectors, vl)
    if n % vl:
        yield _Channels(n - n % vl, n % vl, 1, 1)


def _strips(nest: _Nest) -> Iterator[_Strip]:
    conv, width, tw = nest.conv, nest.con.m[-1], nest.tw
    stride, lo = conv.stride[-1], conv.lo[-1]
    reach = conv.dilation[-1] * (conv.kernel[-1] - 1)

    def single(first: int) -> _Strip:
        here = min(tw, width - first)
        inside = first * stride >= lo
        inside = inside and (first + here - 1) * stride - lo + reach < nest.extent[-1]
        return _Strip(first, 1, here, inside)

    found = [single(first) for first in range(0, width, tw)]
    for _, alike in itertools.groupby(found, lambda s: (s.width, s.inside, s.inside or s.first)):
        same = list(alike)
        yield _Strip(same[0].first, len(same), same[0].width, same[0].inside)


def _tile(nest: _Nest, at: Index, part: _Channels, q: Expr, strip: _Strip, o: Expr) -> Stmt:
    """One register tile: all kernel offsets, then the epilogue."""
    con, conv = nest.con, nest.conv
    lanes, vectors = part.lanes, part.vectors
    grouped = con.form != "depthwise"
    acc = buffer(nest.th * strip.width * vectors * lanes, con.acc_dtype, "acc", scope="local")
    image, *outer = at
    start = strip.first + o * strip.width
    channel = part.first + q * (vectors * lanes)
    group = T.floordiv(channel, imm(con.n))

    def place(h: int | Expr, i: Expr, j: Expr, v: Expr) -> Expr:
        return ((h * strip.width + i) * vectors + j) * lanes + v

    over = partial(_each, strip, part)

    def taps(line: Index, wanted: Wanted) -> Stmt:
        """An input line, column after column: each is read once, for all sums that want it.

        Kernel offset after offset instead, LLVM would keep what neighbouring offsets share and
        spill it, as sums take most of the registers.
        """
        found = sorted(_readers_of(conv, strip.width))

        def columns(*k: Expr) -> Stmt:  # of one input channel, where a group has several
            return seq([column(line, wanted, at, k) for at in found])

        return loop(con.k[-1], columns, name="k") if grouped else columns()

    def column(line: Index, wanted: Wanted, at: int, k: Index) -> Stmt:
        place_at = start * conv.stride[-1] + (at - conv.lo[-1])

        def vector(j: Expr) -> Stmt:
            return seq(
                [
                    loop(
                        lanes, partial(product, line, place_at, k, (h, offsets), reader, j), *_LANES
                    )
                    for h, offsets in wanted
                    for reader in _readers_of(conv, strip.width)[at]
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
        read = group * con.k[-1] + k[0] if grouped else channel + j * lanes + v
        x = nest.reader.at(con.a, (image, read, *line, column))
        w = _weight(nest, part, q, linear((*offsets, imm(c), *k), con.k), (j, v))
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


def _each(strip: _Strip, part: _Channels, body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
    """A body of a column, a vector and a lane, for all of a line of the tile."""

    def vector(i: Expr, j: Expr) -> Stmt:
        return loop(part.lanes, lambda v: body(i, j, v), VECTORIZED, "v")

    def column(i: Expr) -> Stmt:
        return loop(part.vectors, lambda j: vector(i, j), UNROLLED, "j")

    return loop(strip.width, column, UNROLLED)


def _weight(nest: _Nest, part: _Channels, q: Expr, k: Expr, lane: tuple[Expr, Expr]) -> Expr:
    """The weight of position ``k`` of the reduction, for a vector of a block and a lane of it."""
    depth, (j, v) = nest.con.depth, lane
    if part.lanes == 1:  # the remainder of a vector: ``q`` counts lanes of the last panel
        return load(nest.weights, (part.first // nest.vl * depth + k) * nest.vl + q)
    panel = part.first // nest.vl + q * part.vectors + j
    return load(nest.weights, (panel * depth + k) * nest.vl + v)


def _readers_of(conv: ConvShape, width: int) -> dict[int, list[tuple[int, int]]]:
    """By column of a tile's input: the tile's columns that read it, each at which offset."""
    found: dict[int, list[tuple[int, int]]] = {}
    for i, c in itertools.product(range(width), range(conv.kernel[-1])):
        found.setdefault(i * conv.stride[-1] + c * conv.dilation[-1], []).append((i, c))
    return found


def _lines(nest: _Nest, outer: list[Expr], taps: Callable[[Index, Wanted], Stmt]) -> Iterator[Stmt]:
    """Every input line that the tile reads, once, for all of the output lines that want it."""
    conv = nest.conv
    if not outer:
        yield taps((), [(0, ())])
        return
    if nest.th == 1:
        yield _line_by_line(nest, outer, taps)
        return
    stride, dilation, lo = conv.stride[-2], conv.dilation[-2], conv.lo[-2]
    kernel, size = conv.kernel[-2], nest.extent[-2]
    last = nest.con.m[-2] - 1
    for far in itertools.product(*(range(k) for k in conv.kernel[:-2])):
        place, inside = [], []
        for d, r in enumerate(far):
            position = outer[d] * conv.stride[d] + r * conv.dilation[d] - conv.lo[d]
            place.append(position)
            inside += [position >= 0, position < nest.extent[d]]
        for y in range((nest.th - 1) * stride + (kernel - 1) * dilation + 1):
            wanted = [
                (h, (y - h * stride) // dilation)
                for h in range(nest.th)
                if (y - h * stride) % dilation == 0 and 0 <= (y - h * stride) // dilation < kernel
            ]
            if not wanted:
                continue
            line = outer[-1] * (nest.th * stride) + (y - lo)
            known = [(h, tuple(imm(r) for r in (*far, offset))) for h, offset in wanted]
            body = taps((*place, line), known)
            guards = list(inside)
            if y < lo:
                guards.append(line >= 0)
            if last // nest.th * nest.th * stride + y - lo >= size:
                guards.append(line < size)
            yield when(T.all(*guards), body) if guards else body


def _line_by_line(nest: _Nest, outer: list[Expr], taps: Callable[[Index, Wanted], Stmt]) -> Stmt:
    """Loops over kernel lines for a tile of one output line; nothing is unrolled."""
    conv = nest.conv

    def visit(place: Index, offsets: Index) -> Stmt:
        d = len(offsets)
        if d == len(outer):
            return taps(place, [(0, offsets)])
        stride, dilation, lo, size = conv.stride[d], conv.dilation[d], conv.lo[d], nest.extent[d]
        kernel, highest = conv.kernel[d], (nest.con.m[d + 1] - 1) * conv.stride[d] - lo

        def line(r: Expr) -> Stmt:
            at = outer[d] * stride + r * dilation - lo
            guards = [at >= 0] if lo > 0 else []
            guards += [at < size] if highest + (kernel - 1) * dilation >= size else []
            body = visit((*place, at), (*offsets, r))
            return when(T.all(*guards), body) if guards else body

        return loop(kernel, line, name="r")

    return visit((), ())


def _write(
    nest: _Nest,
    where: tuple[Expr, Expr, Index, Expr],
    shape: tuple[_Channels, _Strip],
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
