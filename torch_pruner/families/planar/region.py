"""The region that a task of a planar kernel reads: what it needs of the input, padding included."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import (
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    imm,
    loop,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.builders import vector as ramp
from torch_pruner.codegen.tir.values import store

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.tir.reader import Reader
    from torch_pruner.families.planar.form import Lying, Phase, Planes
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph


@dataclass
class Nest:
    """Everything the parts of one emission share."""

    spec: Graph
    con: Contraction
    planes: Planes
    reader: Reader
    weights: Buffer
    out: Buffer
    near: Buffer  # the region: channel, kernel plane, phases, line, position
    vl: int
    tm: int
    nv: int
    ln: int
    below: bool = False  # vectors of a tile lie below one another
    lying: Lying | None = None  # where lines are read that are not copied
    origin: Expr | None = None  # there, of the task's first line of its first channel

    @cached_property
    def sums(self) -> Buffer:
        """By result of a position along its line, output channel, position."""
        # Vectors that are woven reach past the last line.
        size = self.planes.spread[2] * self.tm * self.length + self.vl
        return buffer(size, "float32", "sums")

    @property
    def width(self) -> int:
        """Positions of a tile."""
        return self.nv * self.vl

    @property
    def apart(self) -> int:
        """Positions from a vector of a tile to the next."""
        return self.planes.pitch if self.below else self.vl

    @property
    def along(self) -> int:
        """Vectors of a line, where they lie below one another."""
        return -(-self.planes.out[2] // self.vl)

    @property
    def tiles(self) -> int:
        """Of positions."""
        if self.below:
            return -(-self.ln // self.nv) * self.along
        return -(-self.ln * self.planes.pitch // self.width)

    @property
    def length(self) -> int:
        """Positions of all tiles."""
        return self.ln * self.planes.pitch + self.vl if self.below else self.tiles * self.width

    def begin(self, q: Expr) -> Expr:
        """The first position of a tile: where nothing lies behind the last line, tiles overlap.

        So do those below one another at the last lines and at the end of each.
        """
        pitch = self.planes.pitch
        if self.below:
            line, x = T.floordiv(q, self.along) * self.nv, T.floormod(q, self.along) * self.vl
            if self.ln % self.nv:
                line = T.min(line, imm(self.ln - self.nv))
            if self.along > 1:
                x = T.min(x, imm(self.planes.out[2] - self.vl))
            return line * pitch + x
        last = self.ln * pitch - self.width
        whole = self.lying is None or last == (self.tiles - 1) * self.width
        return q * self.width if whole else T.min(q * self.width, imm(last))

    @property
    def by_tap(self) -> bool:
        """Whether weights lie tap by tap, and not channel by channel."""
        return self.con.form == "conv_phases"

    @property
    def piece(self) -> int:
        """Elements of a phase's lines in the region."""
        lines: int = self.planes.lines(self.ln)
        return lines * self.planes.pitch


def beyond(planes: Planes, width: int) -> int:
    """Elements behind the region that the last tile reads, for sums that nobody wants."""
    return width + max(p.reach for p in planes.phases(2)) + planes.late(2)


def zero() -> Expr:
    return T.const(0, "float32")


def run(
    nest: Nest, start: int, count: int, body: Callable[[Expr], Stmt], *, again: bool = False
) -> Stmt | None:
    """``body`` of neighbouring positions, in whole vectors and a rest.

    ``again``: ``body`` may be repeated. Then the rest is a vector as well, and begins earlier: one
    of 14 lanes would be moved in three pieces.
    """
    lanes = nest.vl
    if again:
        lanes = min(lanes, 1 << count.bit_length() >> 1)
    whole, rest = divmod(count, max(lanes, 1))

    def vector(first: Expr | int, size: int) -> Stmt:
        return loop(size, lambda v: body(first + v), VECTORIZED, "v")

    found = [loop(whole, lambda q: vector(start + q * lanes, lanes), name="q")] if whole else []
    if rest:
        size = lanes if again else rest
        found.append(vector(start + count - size, size))
    return seq(found) if found else None


def clear(nest: Nest) -> Stmt:
    """What stays zero: beside the lines of a region, and behind it."""
    planes, pitch, wide = nest.planes, nest.planes.pitch, nest.planes.phases(2)
    padded = [b for b, phase in enumerate(wide) if _span(planes, phase) != (0, pitch)]

    def zeros(at: Expr | int) -> Callable[[Expr], Stmt]:
        return lambda x: store(nest.near, at + x, zero())

    def beside(b: int, first: Expr) -> Stmt:
        left, end = _span(planes, wide[b])
        return seq([run(nest, x, n, zeros(first)) for x, n in ((0, left), (end, pitch - end)) if n])

    def pieces(c: Expr) -> Stmt:  # of a channel's plane, for one phase of lines
        def piece(b: int) -> Stmt:
            base = (c * len(wide) + b) * nest.piece
            return loop(planes.lines(nest.ln), lambda i: beside(b, base + i * pitch), name="i")

        return seq([piece(b) for b in padded])

    count = planes.channels * planes.planes * len(planes.phases(1))
    lines = loop(count, pieces, name="c") if padded else None
    behind = run(nest, 0, beyond(planes, nest.width), zeros(planes.region(nest.ln)))
    return seq([lines, behind])


def copy_channel(nest: Nest, image: Expr, g: Expr, c: Expr, plane: Expr, first: Expr) -> Stmt:
    """The lines of one channel that the task reads, padding included."""
    planes, piece, pitch = nest.planes, nest.piece, nest.planes.pitch
    tall, wide = planes.phases(1), planes.phases(2)
    channel = g * planes.channels + c

    def from_plane(r: Expr) -> Stmt:
        depth = plane * planes.stride[0] + r * planes.dilation[0] - planes.lo[0]

        def phase(a: int, b: int) -> Stmt:
            base = (((c * planes.planes + r) * len(tall) + a) * len(wide) + b) * piece

            def line(i: Expr) -> Stmt:
                height = (first + i) * planes.stride[1] + (tall[a].number - planes.lo[1])
                at = base + i * pitch
                whole = _line(nest, (image, channel), (depth, height), wide[b], at)
                inside = [
                    *_inside(planes, 0, depth),
                    *_inside(planes, 1, height),
                ]
                if not inside or whole is None:  # nothing of the input: zeros that stay
                    return S.Evaluate(imm(0)) if whole is None else whole
                left, end = _span(planes, wide[b])
                zeros = run(
                    nest,
                    left,
                    end - left,
                    lambda x: store(nest.near, at + x, zero()),
                    again=True,
                )
                return when(T.all(*inside), whole, zeros)

            return loop(planes.lines(nest.ln), line, name="i")

        return seq([phase(a, b) for a in range(len(tall)) for b in range(len(wide))])

    return loop(planes.planes, from_plane, name="r")


def _inside(planes: Planes, axis: int, at: Expr) -> list[Expr]:
    """Conditions that a position of an axis is no padding, where it may be."""
    out, kernel = planes.out[axis] - 1, planes.kernel[axis] - 1
    reach = out * planes.stride[axis] + kernel * planes.dilation[axis] + planes.late(axis)
    lo, extent = planes.lo[axis], planes.extent[axis]
    # Lines of a phase that no offset reads may lie behind the last one.
    spare = planes.stride[axis] - 1 if axis == 1 else 0
    found = [at >= 0] if lo else []
    return found + ([at < extent] if reach + spare - lo >= extent else [])


def _span(planes: Planes, phase: Phase) -> tuple[int, int]:
    """Positions of a line of the region that the input has."""
    stride, lo, width = planes.stride[2], planes.lo[2], planes.extent[2]
    left = min(max(-(-(lo - phase.number) // stride), 0), planes.pitch)
    return left, min(max((width - 1 + lo - phase.number) // stride + 1, left), planes.pitch)


def _line(
    nest: Nest, channel: tuple[Expr, Expr], place: tuple[Expr, Expr], phase: Phase, base: Expr
) -> Stmt | None:
    """What a line of the region, at ``base``, has of the input."""
    planes = nest.planes
    stride, offset = planes.stride[2], phase.number - planes.lo[2]
    left, end = _span(planes, phase)

    def taken(position: Expr) -> Expr:
        at = (*place, position)[3 - planes.rank :]
        return nest.reader.at(nest.con.a, (*channel, *at))

    def copied(x: Expr) -> Stmt:
        return store(nest.near, base + x, taken(x * stride + offset))

    if lanes := planes.dealt(end - left, nest.vl):
        return _dealt(nest, taken, base, (left, end), offset, lanes)
    return run(nest, left, end - left, copied, again=True)


def _dealt(
    nest: Nest,
    taken: Callable[[Expr], Expr],
    base: Expr,
    span: tuple[int, int],
    offset: int,
    lanes: int,
) -> Stmt:
    """Every other position of a line: of two neighbouring vectors the even lanes or the odd ones.

    Positions ``span`` of the region's line, at ``base``, take from twice that plus ``offset``. The
    last vector begins earlier, to be whole, and reads no further than the line goes.
    """
    left, end = span
    width = nest.planes.extent[2]
    raw = buffer(2 * lanes, "float32", "raw", scope="local")

    def vectors(x: Expr, first: Expr, odd: int) -> Stmt:
        def read(half: int) -> Stmt:
            at = half * lanes
            return nest.reader.scope(
                lambda: [
                    loop(
                        lanes, lambda v: store(raw, at + v, taken(first + at + v)), VECTORIZED, "v"
                    )
                ]
            )

        pair = [raw[ramp(imm(at), lanes)] for at in (0, lanes)]
        dealt = T.Shuffle(pair, [T.const(2 * k + odd, "int32") for k in range(lanes)])
        return seq(
            [stack(raw), read(0), read(1), S.BufferStore(nest.near, dealt, [ramp(base + x, lanes)])]
        )

    start = 2 * left + offset
    whole = min((end - left) // lanes, (width - start) // (2 * lanes))
    found = []
    if whole:

        def vector(q: Expr) -> Stmt:
            return vectors(left + q * lanes, start + q * (2 * lanes), 0)

        found.append(loop(whole, vector, name="q"))
    if whole * lanes < end - left:
        source = 2 * (end - lanes) + offset
        first = min(source, width - 2 * lanes)
        found.append(vectors(imm(end - lanes), imm(first), source - first))
    return seq(found)
