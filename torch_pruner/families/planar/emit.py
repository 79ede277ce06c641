"""Emits convolutions in planes: a copied region, register tiles of channels by positions.

The nest is: parallel over chunks of tasks (images, groups, parts of the output channels, planes,
chunks of lines); a copy of the region; tiles of output channels; tiles of positions; parts of a
long sum; input channels; kernel offsets. Lanes run over the ends of lines, so some are computed
that nobody wants: sums wait in the first cache and are written line by line through the epilogue.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.tir.arithmetic import times
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
from torch_pruner.codegen.tir.builders import vector as ramp
from torch_pruner.codegen.tir.reader import Index, Reader, held, imm, linear, unlinear
from torch_pruner.codegen.tir.values import load, store
from torch_pruner.families.contraction.form import LONG_SUM, SUM_PART
from torch_pruner.families.planar.form import UNROLLED_FMAS, lying, planes_of
from torch_pruner.families.planar.region import Nest, beyond, clear, copy_channel, run, zero
from torch_pruner.graph.contraction import contraction_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.planar.form import PlanarDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

_STEPS = 4  # channels of a kernel of one offset that are written out


def emit(spec: Graph, decisions: PlanarDecisions[int], signature: Signature) -> Emitted:
    """TIR for a convolution in planes."""
    con = contraction_of(spec)
    planes = planes_of(spec, con)
    inputs, (out,), scratch = parameters(signature)
    weights = next(b for b, p in zip(inputs, signature.packs, strict=True) if p is not None)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    vl, tm, nv, ln, rp, chunks, par, copied, below = decisions
    room = planes.region(ln) + beyond(planes, nv * vl)
    near = buffer(room if copied else 1, "float32", "near")
    place = None if copied else lying(spec, con, planes)
    nest = Nest(spec, con, planes, reader, weights, out, near, vl, tm, nv, ln, bool(below), place)
    sums = nest.sums
    shape = planes.tasks(tm, ln, rp)
    tasks = math.prod(shape)
    each = -(-tasks // min(chunks, tasks))

    def chunk(p: Expr) -> Stmt:
        def one(t: Expr) -> Stmt:
            at = p * each + t
            body = _task(nest, unlinear(at, shape), shape[2])
            return body if tasks % each == 0 else when(at < tasks, body)

        some = loop(each, one, name="t")
        if not copied:
            return workspace(sums, some)
        return workspace(near, workspace(sums, seq([clear(nest), some])))

    body = loop(-(-tasks // each), chunk, PARALLEL if par else SERIAL, "p")
    return Emitted(body, inputs, [out], scratch)


def _task(nest: Nest, at: Index, parts: int) -> Stmt:
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

    begins = S.Bind(first, begin)
    if (place := nest.lying) is not None:
        nest.origin = index_var("origin")
        at_channel = image * place.image + g * planes.channels * place.channel
        origin = at_channel + plane * place.plane + first * planes.pitch + place.offset
        return seq([begins, S.Bind(nest.origin, origin), loop(each, block, name="n")])
    copied = loop(
        planes.channels, lambda c: copy_channel(nest, image, g, c, plane, first), name="c"
    )
    return seq([begins, copied, loop(each, block, name="n")])


def _rows(nest: Nest, which: Index, where: Index) -> Stmt:
    """A tile of output channels: all positions of the task's lines, then the epilogue."""
    planes = nest.planes
    _, g, nb = which
    size = planes.depth * nest.tm
    apart = len(planes.phases(1)) * len(planes.phases(2)) * nest.piece
    found, number = [], 0

    def tiles(panel: Expr, shifted: int, kept_at: int) -> Stmt:
        def tile(q: Expr) -> Stmt:
            return _tile(nest, panel, shifted, kept_at, nest.begin(q))

        return loop(nest.tiles, tile, name="q")

    for (after, depth), (below, line) in itertools.product(planes.parts(0), planes.parts(1)):
        for at, (right, _) in enumerate(planes.parts(2)):
            panel = ((number * planes.groups + g) * planes.blocks(nest.tm) + nb) * size
            shifted = after * apart + below * planes.pitch + right
            found.append(tiles(panel, shifted, at * nest.tm * nest.length))
            number += 1
        found.append(_write(nest, which, where, (depth, line)))
    return seq(found)


def _tile(nest: Nest, panel: Expr, shifted: int, kept_at: int, begin: Expr) -> Stmt:
    """Sums of one register tile, into ``nest.sums``."""
    planes, vl, length = nest.planes, nest.vl, nest.length
    channels, taps = planes.channels, planes.taps
    acc = buffer(nest.tm * nest.width, "float32", "acc", scope="local")

    def each(
        body: Callable[[Expr, Expr, Expr], Stmt], first: int = 0, vectors: int = nest.nv
    ) -> Stmt:
        """``body`` of a row, a vector and a lane of the tile."""

        def vector(i: Expr, j: Expr) -> Stmt:
            return loop(vl, lambda v: body(i, j, v), VECTORIZED, "v")

        def row(i: Expr) -> Stmt:
            if vectors == 1:
                return vector(i, imm(first))
            return loop(vectors, lambda j: vector(i, first + j), UNROLLED, "j")

        return loop(nest.tm, row, UNROLLED, "i")

    def in_sums(i: Expr, j: Expr, v: Expr) -> Expr:
        return kept_at + i * length + begin + j * nest.apart + v

    def in_acc(i: Expr, j: Expr, v: Expr) -> Expr:
        return (i * nest.nv + j) * vl + v

    def kept(i: Expr, j: Expr, v: Expr, *, more: bool) -> Stmt:
        at, value = in_sums(i, j, v), acc[in_acc(i, j, v)]
        return store(nest.sums, at, nest.sums[at] + value if more else value)

    def channel(c: Expr) -> Stmt:
        def update(tap: Expr | int, shift: Expr | int, line: int | None = None) -> Stmt:
            """Products of an offset, for one of the tile's lines or for all vectors."""
            read, near = nest.near, c * (planes.copies * nest.piece) + shift + (begin + shifted)
            if nest.lying is not None and nest.origin is not None:
                read = nest.reader.buffers[nest.lying.source]
                near = nest.origin + c * nest.lying.channel + begin
            of_channel = tap * channels + c if nest.by_tap else c * taps + tap
            weight = panel + of_channel * nest.tm

            def product(i: Expr, j: Expr, v: Expr) -> Stmt:
                at = in_acc(i, j, v)
                x = v if line is not None else j * vl + v  # one line's shift is known
                terms = load(nest.weights, weight + i), read[near + x]
                return store(acc, at, acc[at] + times(*terms, "float32"))

            return each(product) if line is None else each(product, line, 1)

        return _below(nest, update) if nest.below else _taps(nest, update)

    def some(first: Expr | int, count: int) -> Stmt:
        steps = _STEPS if taps == 1 else 1
        whole, rest = divmod(count, steps)

        def step(k: Expr) -> Stmt:
            return loop(steps, lambda u: channel(first + k * steps + u), UNROLLED, "u")

        found = [loop(whole, step, name="k")] if whole else []
        found += [channel(first + imm(whole * steps + u)) for u in range(rest)]
        return seq(found)

    def cleared() -> Stmt:
        return each(lambda *at: store(acc, in_acc(*at), zero()))

    per_part = max(1, SUM_PART // taps) if planes.depth > LONG_SUM else channels
    whole, rest = divmod(channels, per_part)
    if whole + (rest > 0) == 1:
        body = [
            cleared(),
            some(imm(0), channels),
            each(partial(kept, more=False)),
        ]
        return seq([stack(acc), *body])

    def part(first: Expr, count: int) -> Stmt:
        return seq([cleared(), some(first, count), each(partial(kept, more=True))])

    parts = [loop(whole, lambda o: part(o * per_part, per_part), name="part")]
    parts += [part(imm(whole * per_part), rest)] if rest else []
    return seq([stack(acc), each(lambda *at: store(nest.sums, in_sums(*at), zero())), *parts])


def _taps(nest: Nest, update: Callable[[Expr | int, Expr | int], Stmt]) -> Stmt:
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


def _below(nest: Nest, update: Callable[[int, int, int], Stmt]) -> Stmt:
    """``update`` of every kernel offset and line of a tile: column after column, and of each the
    region's lines one after another, so that one is read once for all sums that want it."""
    planes, pitch = nest.planes, nest.planes.pitch
    tall, wide = planes.phases(1), planes.phases(2)
    lines, found = planes.read_below(nest.nv), []
    for r, (b, phase) in itertools.product(range(planes.kernel[0]), enumerate(wide)):
        for j in range(phase.count):
            column, right = phase.first + j * phase.step, phase.shift + j * phase.apart
            for (down, a), wanted in lines.items():
                base = ((r * len(tall) + a) * len(wide) + b) * nest.piece + down * pitch + right
                for row, line in wanted:
                    tap = (r * planes.kernel[1] + row) * planes.kernel[2] + column
                    found.append(update(tap, base, line))
    return seq(found)


def _write(nest: Nest, which: Index, where: Index, place: tuple[int, int]) -> Stmt:
    """The epilogue: what is wanted of the sums, line by line. ``place``: of a position's results,
    the plane and line of these."""
    planes, spec, con = nest.planes, nest.spec, nest.con
    image, g, nb = which
    plane, first, own = where
    path = output_path(spec, con.anchor)
    shape, dtype = spec.nodes[path[-1]].shape, spec.nodes[con.anchor].dtype
    depth, down, across = planes.spread
    height = planes.out[1]
    parts = {offset: at for at, (_, offset) in enumerate(planes.parts(2))}
    before = parts[0] + across

    def row(i: Expr) -> Stmt:
        channel = nb * nest.tm + i

        def line(h: Expr) -> Stmt:
            here = i * nest.length + h * planes.pitch
            woven = _woven(nest, here, parts[0]) if across == 2 else None

            def element(x: Expr) -> Stmt:
                at = (plane * depth + place[0], (first + h) * down + place[1], x)
                index = (image, g * planes.rows + channel, *at[3 - planes.rank :])
                index = along(spec, path, index)
                kept = here + x
                if across > 1:  # offsets count backwards, from that of the first part
                    part = T.floormod(before - T.floormod(x, across), across)
                    kept = here + part * (nest.tm * nest.length) + T.floordiv(x, across)
                value = held(nest.sums, kept, dtype) if woven is None else held(woven[0], x, dtype)
                nest.reader.overrides[con.anchor] = value
                return nest.reader.scope(
                    lambda: [store(nest.out, linear(index, shape), nest.reader.at(path[-1], index))]
                )

            body = run(nest, 0, planes.out[2] * across, element, again=True)
            assert body is not None
            body = body if woven is None else seq([*woven[1], body])
            return body if height % nest.ln == 0 else when(first + h >= own, body)

        body = loop(nest.ln, line, name="h")
        return body if planes.rows % nest.tm == 0 else when(channel < planes.rows, body)

    return loop(nest.tm, row, name="i")


def _woven(nest: Nest, here: Expr, even: int) -> tuple[Buffer, list[Stmt]]:
    """A line of results, two of each position, in order, and what puts them there: sums of part
    ``even`` and of the other one, from ``here`` on, in turns."""
    vl, size = nest.vl, nest.tm * nest.length
    count = -(-nest.planes.out[2] // vl)
    line = buffer(2 * count * vl, "float32", "line", scope="local")
    halves = [[k + vl * odd for k in range(n, n + vl // 2) for odd in (0, 1)] for n in (0, vl // 2)]

    def vectors(q: Expr) -> Stmt:
        at = q * vl
        pair = [nest.sums[ramp(here + part * size + at, vl)] for part in (even, 1 - even)]
        stored = []
        for half, order in enumerate(halves):
            value = T.Shuffle(pair, [T.const(k, "int32") for k in order])
            stored.append(S.BufferStore(line, value, [ramp(2 * at + half * vl, vl)]))
        return seq(stored)

    return line, [stack(line), loop(count, vectors, name="q")]
