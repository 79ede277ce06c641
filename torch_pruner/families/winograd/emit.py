"""Emits convolutions by minimal filtering: transform, products, transform back.

The nest is: parallel over chunks of tiles and shares of groups or of the columns; blocks of tiles;
groups; transform of a block's inputs; column panels; positions; register tiles over all channels;
and, panel by panel, the results of a block from the products of all positions, through the
epilogue. What passes between the three steps stays in a core's cache. See ``form`` for the
algorithm.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import row_counts
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import phase
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    ForKind,
    S,
    Stmt,
    T,
    buffer,
    index_var,
    loop,
    prefetch,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, held, imm, linear, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.winograd.form import places, winograd_of
from torch_pruner.families.winograd.matrices import RESULTS
from torch_pruner.families.winograd.nest import Nest, shift_of, tile_at
from torch_pruner.families.winograd.transform import transformed, transformed_by_lines
from torch_pruner.families.winograd.weights import pack_weights
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.winograd.form import WinogradDecisions
    from torch_pruner.families.winograd.nest import Tile
    from torch_pruner.graph.ir import Graph, Shape
    from torch_pruner.graph.signature import Signature

_LINE = 64


def emit(
    spec: Graph, decisions: WinogradDecisions[int], signature: Signature, results: int = RESULTS
) -> Emitted:
    """TIR for a convolution of three taps."""
    plan = winograd_of(spec, results)
    assert plan is not None
    inputs, (out,), scratch = parameters(signature)
    given, products, *own = scratch
    packed = [b for b, p in zip(inputs, signature.packs, strict=True) if p is not None]
    (weights,) = own or packed
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    vl, tm, nv, tb, chunks, shares, ku, ahead, parallel = decisions
    nest = Nest(
        spec, plan, reader, vl, tm, nv, tb, ku, bool(ahead), weights, given,
        products, out, row_counts(spec, plan.con, reader),
    )  # fmt: skip
    kind = PARALLEL if parallel else SERIAL
    body = _compute(nest, chunks, shares, kind)
    if own:
        body = seq([pack_weights(spec, plan, reader, weights, (vl, nv), kind), body])
    return Emitted(body, inputs, [out], scratch)


def _compute(nest: Nest, chunks: int, shares: int, kind: ForKind) -> Stmt:
    plan, rows = nest.plan, nest.rows
    chunks, per_chunk = plan.blocked(rows, chunks)
    blocks, panels, groups = -(-plan.tiles // rows), plan.con.n // nest.bn, plan.groups
    if groups > 1:
        groups //= shares
    else:
        panels //= shares

    tiles = math.prod(nest.grid[1:], start=nest.grid[0])
    # Of tiles that are counted at run time each chunk has as many.
    each = T.truncdiv(tiles + (rows * chunks - 1), rows * chunks) if nest.varies else per_chunk

    def task(p: Expr) -> Stmt:
        chunk, share = unlinear(p, (chunks, shares))

        def block(b: Expr) -> Stmt:
            at = chunk * each + b
            first = index_var("first")
            own: Callable[[Expr], Expr] | None
            if nest.varies:
                begin, own = S.Bind(first, at * rows), lambda t: t < tiles
            else:
                # The last block begins earlier, to be whole; what is not its own it does not store.
                begin = S.Bind(first, T.min(at * rows, imm(plan.tiles - rows)))
                own = None if plan.tiles % rows == 0 else lambda t: t >= at * rows

            def group(at: Expr) -> Stmt:
                g = share * groups + at if plan.groups > 1 else imm(0)

                def panel(n: Expr) -> Stmt:
                    nb = (g if plan.groups > 1 else share) * panels + n
                    column = (n if plan.by_phase else nb) * nest.bn
                    results = _results(nest, p, (g, column), first, own)
                    return seq([_multiply(nest, p, nb), results])

                return seq([_transform(nest, p, g, first), loop(panels, panel, name="n")])

            body = seq([begin, loop(groups, group, name="g")])
            if nest.varies:
                return when(at * rows < tiles, body)
            return body if blocks % per_chunk == 0 else when(at < blocks, body)

        return loop(each, block, name="b")

    return loop(chunks * shares, task, kind, "p")


def _transform(nest: Nest, p: Expr, g: Expr, first: Expr) -> Stmt:
    """The inputs of a group and a block's tiles, a vector of channels at a time."""
    plan = nest.plan
    # The corners of a tile tell of all of it.
    corners = sorted(itertools.product(*({0, n - 1} for n in plan.tile)))

    parts = math.prod(plan.parts)

    def part(t: Expr, at: Expr) -> Stmt:
        """The channels of positions that are alike modulo the stride; all, where there is none."""
        where = replace(tile_at(nest, first + t), shift=shift_of(nest, g, at))
        conditions = [c for place in corners for c in where.inside(place)]

        def channels(*, guarded: bool) -> Stmt:
            def vector(c: Expr) -> Stmt:
                return _inputs(nest, where, p, (g, t, at, c), guarded=guarded)

            return loop(plan.con.k[-1] // nest.vl, vector, name="c")

        if not conditions:
            return channels(guarded=False)
        return when(T.all(*conditions), channels(guarded=False), channels(guarded=True))

    def tile(t: Expr) -> Stmt:
        return loop(parts, lambda at: part(t, at), name="s") if parts > 1 else part(t, imm(0))

    return loop(nest.rows, tile, name="t")


def _inputs(nest: Nest, tile: Tile, p: Expr, at: Index, *, guarded: bool) -> Stmt:
    """Of a group (the first of ``at``) a tile of a block, and of a part of its channels a vector:
    read and transformed."""
    plan, vl, (g, t, part, c) = nest.plan, nest.vl, at
    size = plan.con.k[-1]
    order = {place: k for k, place in enumerate(places(plan.tile))}
    raw = buffer(plan.positions * vl, plan.con.acc_dtype, "raw", scope="local")

    def fetch(place: Shape) -> Stmt:
        source = tile.source(place)

        def element(v: Expr) -> Stmt:
            channel = c * vl + v if plan.by_phase else g * size + (c * vl + v)
            value = nest.reader.at(plan.con.a, (tile.image, channel, *source))
            return store(raw, order[place] * vl + v, value)

        def absent(v: Expr) -> Stmt:
            return store(raw, order[place] * vl + v, T.const(0, plan.con.acc_dtype))

        body = nest.reader.scope(lambda: [loop(vl, element, VECTORIZED, "v")])
        conditions = tile.inside(place) if guarded else []
        if not conditions:
            return body
        return when(T.all(*conditions), body, loop(vl, absent, VECTORIZED, "v"))

    def keep(place: Shape, v: Expr, value: Expr) -> Stmt:
        row = (p * plan.positions + order[place]) * nest.rows + t
        return store(nest.inputs, row * plan.channels + (part * size + c * vl) + v, value)

    def read(place: Shape, v: Expr) -> Expr:
        return raw[order[place] * vl + v]

    dtype, matrices = plan.con.acc_dtype, plan.input_transform()
    if plan.few:
        whole = [factors[0] for factors in matrices]
        return seq([stack(raw), *map(fetch, order), *transformed(vl, dtype, whole, read, keep)])
    return seq([stack(raw), *transformed_by_lines(vl, dtype, matrices, read, keep, fetch)])


def _multiply(nest: Nest, p: Expr, nb: Expr) -> Stmt:
    """The products of a block's tiles and a panel (of all groups'), position by position."""
    plan, vl, nv, tm, bn = nest.plan, nest.vl, nest.nv, nest.tm, nest.bn
    channels, ku = plan.channels, min(nest.ku, plan.channels)
    acc = buffer(tm * bn, plan.con.acc_dtype, "acc", scope="local")
    zero = T.const(0, plan.con.acc_dtype)

    def each(body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
        def vector(i: Expr, j: Expr) -> Stmt:
            return loop(vl, lambda v: body(i, j, v), VECTORIZED, "v")

        return loop(tm, lambda i: loop(nv, lambda j: vector(i, j), UNROLLED, "j"), UNROLLED)

    def position(w: Expr) -> Stmt:
        panel = (nb * plan.positions + w) * channels

        def tile(q: Expr) -> Stmt:
            row = (p * plan.positions + w) * nest.rows + q * tm

            def update(k: Expr) -> Stmt:
                def step(i: Expr, j: Expr, v: Expr) -> Stmt:
                    lane = j * vl + v
                    a = nest.inputs[(row + i) * channels + k]
                    b = nest.weights[(panel + k) * bn + lane]
                    return store(acc, i * bn + lane, acc[i * bn + lane] + a * b)

                return each(step)

            def step(ko: Expr) -> Stmt:
                body = loop(ku, lambda u: update(ko * ku + u), UNROLLED, "u")
                return seq([_fetch(nest, panel, q, ko), body]) if nest.ahead else body

            def part(s: Expr) -> Stmt:
                """The channels of positions that are alike modulo the stride, if any has a tap."""
                digits = unlinear(s, plan.parts), unlinear(w, plan.tile)
                every = zip(*digits, plan.whole, plan.parts, plan.tile, strict=True)
                lacks = [T.all(i >= n, at >= t - 1) for i, at, n, parts, t in every if n < parts]
                of_part = plan.con.k[-1] // ku
                body = loop(of_part, lambda k: step(s * of_part + k), name="k")
                return when(T.Not(T.any(*lacks)), body)

            def write(i: Expr, j: Expr, v: Expr) -> Stmt:
                lane = j * vl + v
                return store(nest.products, (row + i) * bn + lane, acc[i * bn + lane])

            clear = each(lambda i, j, v: store(acc, i * bn + j * vl + v, zero))
            if plan.whole == plan.parts:
                summed = loop(channels // ku, step, name="k")
            else:
                summed = loop(math.prod(plan.parts), part, name="s")
            return seq([stack(acc), clear, summed, each(write)])

        return loop(nest.tb, tile, name="q")

    return loop(plan.positions, position, name="w")


def _fetch(nest: Nest, panel: Expr, q: Expr, ko: Expr) -> Stmt:
    """A part of the weights of the next position: they come from memory or a far cache."""
    channels, size = nest.plan.channels, ITEMSIZE[nest.plan.con.acc_dtype]
    lines, steps = channels * nest.bn * size // _LINE, nest.tb * (channels // nest.ku)
    each = -(-lines // steps)
    first = T.min((q * (channels // nest.ku) + ko) * each, imm(max(0, lines - each)))
    start = (panel + channels) * nest.bn
    return seq([prefetch(nest.weights, start + (first + j) * (_LINE // size)) for j in range(each)])


def _results(
    nest: Nest, p: Expr, at: tuple[Expr, Expr], first: Expr, own: Callable[[Expr], Expr] | None
) -> Stmt:
    """The results of a block's tiles for the columns of a panel, each stored once.

    ``at``: the group, and the first column.
    """
    plan, vl, (g, begin) = nest.plan, nest.vl, at
    order = {place: k for k, place in enumerate(places(plan.tile))}
    made = {place: k for k, place in enumerate(places(plan.step))}

    def tile(t: Expr) -> Stmt:
        where = tile_at(nest, first + t)

        def vector(j: Expr) -> Stmt:
            done = buffer(len(made) * vl, plan.con.acc_dtype, "done", scope="local")
            column = begin + j * vl

            def product(place: Shape, v: Expr) -> Expr:
                row = (p * plan.positions + order[place]) * nest.rows + t
                return nest.products[row * nest.bn + j * vl + v]

            def keep(place: Shape, v: Expr, value: Expr) -> Stmt:
                return store(done, made[place] * vl + v, value)

            dtype, matrices = plan.con.acc_dtype, plan.output_transform()
            if plan.few:
                steps = transformed(vl, dtype, [factors[0] for factors in matrices], product, keep)
            else:
                steps = transformed_by_lines(vl, dtype, matrices, product, keep)
            stored = [_store(nest, where, i, (g, column), (done, k * vl)) for i, k in made.items()]
            return seq([stack(done), *steps, *stored])

        body = loop(nest.nv, vector, name="j")
        return body if own is None else when(own(first + t), body)

    return loop(nest.rows, tile, name="t")


def _store(
    nest: Nest, tile: Tile, place: Shape, at: tuple[Expr, Expr], value: tuple[Buffer, int]
) -> Stmt:
    """One result of a tile, a vector of columns of a group, through the rest of the graph."""
    spec, anchor, (g, column) = nest.spec, nest.plan.con.anchor, at
    path = output_path(spec, anchor)
    shape, dtype = spec.nodes[path[-1]].shape, spec.nodes[anchor].dtype
    spot, cut = tile.result(place)
    done, kept = value
    if nest.plan.by_phase:
        pairs = zip(spot, nest.plan.con.batch, phase(nest.plan.con, g), strict=True)
        spot = [q * s + apart for q, s, (_, apart) in pairs]

    def element(v: Expr) -> Stmt:
        index: Index = along(spec, path, (tile.image, column + v, *spot))
        nest.reader.overrides[anchor] = held(done, kept + v, dtype)
        return nest.reader.scope(
            lambda: [store(nest.out, linear(index, shape), nest.reader.at(path[-1], index))]
        )

    body = loop(nest.vl, element, VECTORIZED, "v")
    return when(T.all(*cut), body) if cut else body
