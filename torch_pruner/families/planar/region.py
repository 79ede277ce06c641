"""The region that a task of a planar kernel reads: what it needs of the input, padding included."""

from __future__ import annotations

from dataclasses import dataclass
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
    from torch_pruner.families.planar.form import Phase, Planes
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph


@dataclass(slots=True)
class Nest:
    """Everything the parts of one emission share."""

    spec: Graph
    con: Contraction
    planes: Planes
    reader: Reader
    weights: Buffer
    out: Buffer
    near: Buffer  # the region: channel, kernel plane, phases, line, position
    sums: Buffer  # result of a position along its line, output channel, position
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
    def length(self) -> int:
        """Positions of all tiles."""
        return self.tiles * self.width

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


def run(nest: Nest, start: int, count: int, body: Callable[[Expr], Stmt]) -> Stmt | None:
    """``body`` of neighbouring positions, in whole vectors and a rest."""
    whole, rest = divmod(count, nest.vl)

    def vector(q: Expr) -> Stmt:
        return loop(nest.vl, lambda v: body(start + q * nest.vl + v), VECTORIZED, "v")

    found = [loop(whole, vector, name="q")] if whole else []
    if rest:
        last = start + whole * nest.vl
        found.append(loop(rest, lambda v: body(last + v), VECTORIZED, "v"))
    return seq(found) if found else None


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
                whole = _line(nest, (image, channel), (depth, height), wide[b], base + i * pitch)
                inside = [
                    *_inside(planes, 0, depth),
                    *_inside(planes, 1, height),
                ]
                if not inside:
                    return seq(whole)
                zeros = run(
                    nest, 0, pitch, lambda x: store(nest.near, base + i * pitch + x, zero())
                )
                return when(T.all(*inside), seq(whole), zeros)

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


def _line(
    nest: Nest, channel: tuple[Expr, Expr], place: tuple[Expr, Expr], phase: Phase, base: Expr
) -> list[Stmt | None]:
    planes = nest.planes
    stride, lo, width = planes.stride[2], planes.lo[2], planes.extent[2]
    left = min(max(-(-(lo - phase.number) // stride), 0), planes.pitch)
    end = min(max((width - 1 + lo - phase.number) // stride + 1, left), planes.pitch)

    def padding(x: Expr) -> Stmt:
        return store(nest.near, base + x, zero())

    def taken(position: Expr) -> Expr:
        at = (*place, position)[3 - planes.rank :]
        return nest.reader.at(nest.con.a, (*channel, *at))

    def copied(x: Expr) -> Stmt:
        return store(nest.near, base + x, taken(x * stride + (phase.number - lo)))

    if lanes := planes.dealt(end - left, nest.vl):
        some = (left, end), phase.number - lo
        middle: Stmt | None = _dealt(nest, taken, base, *some, lanes)
    else:
        middle = run(nest, left, end - left, copied)
    return [run(nest, 0, left, padding), middle, run(nest, end, planes.pitch - end, padding)]


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
