"""Emits convolutions in planes: a copied region, register tiles of channels by positions.

The nest is: parallel over chunks of tasks (images, groups, parts of the output channels, planes,
chunks of lines); a copy of the region; tiles of output channels; tiles of positions; parts of a
long sum; input channels; kernel offsets. Lanes run over the ends of lines, so some are computed
that nobody wants: sums wait in the first cache and are written line by line through the epilogue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    index_var,
    loop,
    seq,
    stack,
    when,
    workspace,
)
from torch_pruner.codegen.tir.reader import Index, Reader, held, imm, linear, unlinear
from torch_pruner.codegen.tir.scalar import times
from torch_pruner.codegen.tir.values import load, store
from torch_pruner.families.contraction.form import LONG_SUM, SUM_PART
from torch_pruner.families.planar.form import planes_of
from torch_pruner.graph.contraction import contraction_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.planar.form import Phase, PlanarDecisions, Planes
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

UNROLLED_FMAS = 288
"""Vector multiply-adds of a channel that are written out; of more, loops over kernel lines."""
_STEPS = 4  # channels of a kernel of one offset that are written out


@dataclass(slots=True)
class _Nest:
    """Everything the parts of one emission share."""

    spec: Graph
    con: Contraction
    planes: Planes
    reader: Reader
    weights: Buffer
    out: Buffer
    near: Buffer  # the region: channel, kernel plane, phases, line, position
    sums: Buffer  # output channel, position
    vl: int
    tm: int
    nv: int
    ln: int

    @property
    def width(self) -> int:
        """Positions of a tile."""
        return self.nv * self.vl

    @property
    def tiles(self) -> int:
        """Of positions."""
        return -(-self.ln * self.planes.pitch // self.width)

    @property
    def piece(self) -> int:
        """Elements of a phase's lines in the region."""
        lines: int = self.planes.lines(self.ln)
        return lines * self.planes.pitch


def emit(spec: Graph, decisions: PlanarDecisions[int], signature: Signature) -> Emitted:
    """TIR for a convolution in planes."""
    con = contraction_of(spec)
    planes = planes_of(spec, con)
    inputs, (out,), scratch = parameters(signature)
    weights = next(b for b, p in zip(inputs, signature.packs, strict=True) if p is not None)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    vl, tm, nv, ln, rp, chunks, par = decisions
    tiles = -(-ln * planes.pitch // (nv * vl))
    room = planes.region(ln) + _beyond(planes, nv * vl)
    near = buffer(room, "float32", "near")
    sums = buffer(tm * tiles * nv * vl, "float32", "sums")
    nest = _Nest(spec, con, planes, reader, weights, out, near, sums, vl, tm, nv, ln)
    shape = planes.tasks(tm, ln, rp)
    tasks = math.prod(shape)
    each = -(-tasks // min(chunks, tasks))

    def chunk(p: Expr) -> Stmt:
        def one(t: Expr) -> Stmt:
            at = p * each + t
            body = _task(nest, unlinear(at, shape), shape[2])
            return body if tasks % each == 0 else when(at < tasks, body)

        return workspace(near, workspace(sums, loop(each, one, name="t")))

    body = loop(-(-tasks // each), chunk, PARALLEL if par else SERIAL, "p")
    return Emitted(body, inputs, [out], scratch)


def _beyond(planes: Planes, width: int) -> int:
    """Elements behind the region that the last tile reads, for sums that nobody wants."""
    return width + max(p.reach for p in planes.phases(2))


def _task(nest: _Nest, at: Index, parts: int) -> Stmt:
    planes, ln, height = nest.planes, nest.ln, nest.planes.out[1]
    image, g, part, plane, chunk = at
    first = index_var("first")
    begin = chunk * ln if height % ln == 0 else T.min(chunk * ln, imm(height - ln))
    blocks = planes.blocks(nest.tm)
    each = -(-blocks // parts)

    def block(n: Expr) -> Stmt:
        nb = part * each + n
        body = _rows(nest, (image, g, nb), (plane, first, chunk * ln))
        return body if blocks % each == 0 else when(nb < blocks, body)

    rest = _beyond(planes, nest.width)
    clear = _run(nest, 0, rest, lambda x: store(nest.near, planes.region(ln) + x, _ZERO()))
    copied = loop(planes.channels, lambda c: _copy(nest, image, g, c, plane, first), name="c")
    return seq([S.Bind(first, begin), clear, copied, loop(each, block, name="n")])


def _ZERO() -> Expr:
    return T.const(0, "float32")


def _run(nest: _Nest, start: int, count: int, body: Callable[[Expr], Stmt]) -> Stmt | None:
    """``body`` of neighbouring positions, in whole vectors and a rest."""
    whole, rest = divmod(count, nest.vl)

    def vector(q: Expr) -> Stmt:
        return loop(nest.vl, lambda v: body(start + q * nest.vl + v), VECTORIZED, "v")

    found = [loop(whole, vector, name="q")] if whole else []
    if rest:
        last = start + whole * nest.vl
        found.append(loop(rest, lambda v: body(last + v), VECTORIZED, "v"))
    return seq(found) if found else None


def _copy(nest: _Nest, image: Expr, g: Expr, c: Expr, plane: Expr, first: Expr) -> Stmt:
    """The lines of one channel that the task reads, padding included."""
    planes, piece, pitch = nest.planes, nest.piece, nest.planes.pitch
    tall, wide = planes.phases(1), planes.phases(2)
    channel = g * planes.channels + c

    def from_plane(r: Expr) -> Stmt:
        depth = plane * planes.stride[0] + r * planes.dilation[0] - planes.lo[0]

        def phase(a: int, b: int) -> Stmt:
            base = (((c * planes.kernel[0] + r) * len(tall) + a) * len(wide) + b) * piece

            def line(i: Expr) -> Stmt:
                height = (first + i) * planes.stride[1] + (tall[a].number - planes.lo[1])
                whole = _line(nest, (image, channel), (depth, height), wide[b], base + i * pitch)
                inside = [
                    *_inside(planes, 0, depth, planes.out[0], planes.kernel[0]),
                    *_inside(planes, 1, height, planes.out[1], planes.kernel[1]),
                ]
                if not inside:
                    return seq(whole)
                zeros = _run(
                    nest, 0, pitch, lambda x: store(nest.near, base + i * pitch + x, _ZERO())
                )
                return when(T.all(*inside), seq(whole), zeros)

            return loop(planes.lines(nest.ln), line, name="i")

        return seq([phase(a, b) for a in range(len(tall)) for b in range(len(wide))])

    return loop(planes.kernel[0], from_plane, name="r")


def _inside(planes: Planes, axis: int, at: Expr, out: int, kernel: int) -> list[Expr]:
    """Conditions that a position of an axis is no padding, where it may be."""
    reach = (out - 1) * planes.stride[axis] + (kernel - 1) * planes.dilation[axis]
    lo, extent = planes.lo[axis], planes.extent[axis]
    # Lines of a phase that no offset reads may lie behind the last one.
    spare = planes.stride[axis] - 1 if axis == 1 else 0
    found = [at >= 0] if lo else []
    return found + ([at < extent] if reach + spare - lo >= extent else [])


def _line(
    nest: _Nest, channel: tuple[Expr, Expr], place: tuple[Expr, Expr], phase: Phase, base: Expr
) -> list[Stmt | None]:
    planes = nest.planes
    stride, lo, width = planes.stride[2], planes.lo[2], planes.extent[2]
    left = min(max(-(-(lo - phase.number) // stride), 0), planes.pitch)
    end = min(max((width - 1 + lo - phase.number) // stride + 1, left), planes.pitch)

    def zero(x: Expr) -> Stmt:
        return store(nest.near, base + x, _ZERO())

    def copied(x: Expr) -> Stmt:
        at = (*place, x * stride + (phase.number - lo))[3 - planes.rank :]
        return store(nest.near, base + x, nest.reader.at(nest.con.a, (*channel, *at)))

    return [
        _run(nest, 0, left, zero),
        _run(nest, left, end - left, copied),
        _run(nest, end, planes.pitch - end, zero),
    ]


def _rows(nest: _Nest, which: Index, where: Index) -> Stmt:
    """A tile of output channels: all positions of the task's lines, then the epilogue."""
    planes = nest.planes
    _, g, nb = which
    panel = (g * planes.blocks(nest.tm) + nb) * (planes.depth * nest.tm)
    tiles = loop(nest.tiles, lambda q: _tile(nest, panel, q * nest.width), name="q")
    return seq([tiles, _write(nest, which, where)])


def _tile(nest: _Nest, panel: Expr, begin: Expr) -> Stmt:
    """Sums of one register tile, into ``nest.sums``."""
    planes, vl, length = nest.planes, nest.vl, nest.tiles * nest.width
    channels, taps = planes.channels, planes.taps
    acc = buffer(nest.tm * nest.width, "float32", "acc", scope="local")

    def each(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """``body`` of a row and a position of the tile."""

        def vector(i: Expr, j: Expr) -> Stmt:
            return loop(vl, lambda v: body(i, j * vl + v), VECTORIZED, "v")

        def row(i: Expr) -> Stmt:
            return loop(nest.nv, lambda j: vector(i, j), UNROLLED, "j")

        return loop(nest.tm, row, UNROLLED, "i")

    def clear(buf: Buffer, row: int, first: Expr | int) -> Stmt:
        return each(lambda i, x: store(buf, i * row + first + x, _ZERO()))

    def kept(i: Expr, x: Expr, *, more: bool) -> Stmt:
        at, value = i * length + begin + x, acc[i * nest.width + x]
        return store(nest.sums, at, nest.sums[at] + value if more else value)

    def channel(c: Expr) -> Stmt:
        def update(tap: Expr | int, shift: Expr | int) -> Stmt:
            near = c * (planes.copies * nest.piece) + shift + begin
            weight = panel + (c * taps + tap) * nest.tm

            def product(i: Expr, x: Expr) -> Stmt:
                at = i * nest.width + x
                terms = load(nest.weights, weight + i), nest.near[near + x]
                return store(acc, at, acc[at] + times(*terms, "float32"))

            return each(product)

        return _taps(nest, update)

    def some(first: Expr | int, count: int) -> Stmt:
        steps = _STEPS if taps == 1 else 1
        whole, rest = divmod(count, steps)

        def step(k: Expr) -> Stmt:
            return loop(steps, lambda u: channel(first + k * steps + u), UNROLLED, "u")

        found = [loop(whole, step, name="k")] if whole else []
        found += [channel(first + imm(whole * steps + u)) for u in range(rest)]
        return seq(found)

    per_part = max(1, SUM_PART // taps) if planes.depth > LONG_SUM else channels
    whole, rest = divmod(channels, per_part)
    if whole + (rest > 0) == 1:
        body = [
            clear(acc, nest.width, 0),
            some(imm(0), channels),
            each(lambda i, x: kept(i, x, more=False)),
        ]
        return seq([stack(acc), *body])

    def part(first: Expr, count: int) -> Stmt:
        body = [clear(acc, nest.width, 0), some(first, count)]
        return seq([*body, each(lambda i, x: kept(i, x, more=True))])

    parts = [loop(whole, lambda o: part(o * per_part, per_part), name="part")]
    parts += [part(imm(whole * per_part), rest)] if rest else []
    return seq([stack(acc), clear(nest.sums, length, begin), *parts])


def _taps(nest: _Nest, update: Callable[[Expr | int, Expr | int], Stmt]) -> Stmt:
    """``update`` of every kernel offset: its number, and its shift within a channel's region."""
    planes, pitch = nest.planes, nest.planes.pitch
    tall, wide = planes.phases(1), planes.phases(2)
    written_out = planes.taps * nest.tm * nest.nv <= UNROLLED_FMAS

    def across(r: Expr | int, a: int, row: Expr | int, down: Expr | int) -> list[Stmt]:
        number = (r * planes.kernel[1] + row) * planes.kernel[2]
        found = []
        for b, phase in enumerate(wide):
            base = ((r * len(tall) + a) * len(wide) + b) * nest.piece + down * pitch
            for j in range(phase.count):
                tap = number + (phase.first + j * phase.step)
                found.append(update(tap, base + (phase.shift + j * phase.apart)))
        return found

    def lines(r: Expr | int, a: int) -> Stmt:
        phase = tall[a]

        def line(j: Expr | int) -> Stmt:
            row, down = phase.first + j * phase.step, phase.shift + j * phase.apart
            return seq(across(r, a, row, down))

        if written_out:
            return seq([line(j) for j in range(phase.count)])
        return loop(phase.count, line, name="h")

    def plane(r: Expr | int) -> Stmt:
        return seq([lines(r, a) for a in range(len(tall))])

    if written_out:
        return seq([plane(r) for r in range(planes.kernel[0])])
    return loop(planes.kernel[0], plane, name="r")


def _write(nest: _Nest, which: Index, where: Index) -> Stmt:
    """The epilogue: what is wanted of the sums, line by line."""
    planes, spec, con = nest.planes, nest.spec, nest.con
    image, g, nb = which
    plane, first, own = where
    path = output_path(spec, con.anchor)
    shape, dtype = spec.nodes[path[-1]].shape, spec.nodes[con.anchor].dtype
    length, height = nest.tiles * nest.width, planes.out[1]

    def row(i: Expr) -> Stmt:
        channel = nb * nest.tm + i

        def line(h: Expr) -> Stmt:
            def element(x: Expr) -> Stmt:
                at = (plane, first + h, x)[3 - planes.rank :]
                index = along(spec, path, (image, g * planes.rows + channel, *at))
                kept = i * length + h * planes.pitch + x
                nest.reader.overrides[con.anchor] = held(nest.sums, kept, dtype)
                return nest.reader.scope(
                    lambda: [store(nest.out, linear(index, shape), nest.reader.at(path[-1], index))]
                )

            body = _run(nest, 0, planes.out[2], element)
            assert body is not None
            return body if height % nest.ln == 0 else when(first + h >= own, body)

        body = loop(nest.ln, line, name="h")
        return body if planes.rows % nest.tm == 0 else when(channel < planes.rows, body)

    return loop(nest.tm, row, name="i")
