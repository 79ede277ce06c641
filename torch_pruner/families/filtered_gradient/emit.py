"""Emits gradients of three-tap convolutions' weights: transform, products, transform back.

The nest is: parallel over shares of both operands' channels; blocks of tiles; transforms of what a
block reads; positions; register tiles over all tiles of the block, added to the task's sums; at the
end the sums of all positions become weights. See ``form`` for the algorithm.
"""

from __future__ import annotations

import itertools
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
    Stmt,
    T,
    buffer,
    loop,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, held, imm, linear, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.filtered_gradient.form import FilteredGradient, filtered_gradient_of
from torch_pruner.families.winograd.form import places
from torch_pruner.families.winograd.transform import transformed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.filtered_gradient.form import FilteredGradientDecisions
    from torch_pruner.families.winograd.matrices import Matrix
    from torch_pruner.graph.ir import Graph, Shape
    from torch_pruner.graph.signature import Signature


@dataclass(frozen=True, slots=True)
class _Operand:
    """One of both operands: what a tile of it is, and where its transformed vectors lie.

    These lie (task, position, group of vectors, tile of the block, vector of the group).
    """

    node: int
    reach: Shape  # elements of a tile along each dimension
    lo: Shape  # zeros before the first element
    matrices: list[Matrix]
    out: Buffer
    count: int  # channels of a task
    group: int  # vectors side by side


@dataclass(frozen=True, slots=True)
class _Nest:
    """Everything the parts of one emission share."""

    spec: Graph
    plan: FilteredGradient
    reader: Reader
    decisions: FilteredGradientDecisions[int]
    rows: _Operand
    columns: _Operand
    sums: Buffer  # (task, position, row, column)
    out: Buffer

    @property
    def vl(self) -> int:
        return self.decisions.vl

    @property
    def order(self) -> dict[Shape, int]:
        return {place: k for k, place in enumerate(places(self.plan.tile))}


def emit(spec: Graph, decisions: FilteredGradientDecisions[int], signature: Signature) -> Emitted:
    """TIR for the gradient of a three-tap convolution's weights."""
    plan = filtered_gradient_of(spec)
    assert plan is not None
    con, none = plan.con, (0,) * len(plan.tile)
    assert con.conv is not None
    inputs, (out,), (first, second, sums) = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    shares = plan.channels // decisions.cs, con.n // decisions.ns
    rows = _Operand(con.a, plan.tile, con.conv.lo, plan.input_transform(), first, shares[0], 1)
    columns = _Operand(
        con.b, plan.step, none, plan.result_transform(), second, shares[1], decisions.nv
    )
    nest = _Nest(spec, plan, reader, decisions, rows, columns, sums, out)
    return Emitted(_tasks(nest), inputs, [out], [first, second, sums])


def _tasks(nest: _Nest) -> Stmt:
    plan, d = nest.plan, nest.decisions

    def task(p: Expr) -> Stmt:
        share, other = unlinear(p, (d.cs, d.ns))

        def block(b: Expr) -> Stmt:
            return seq(
                [
                    _transform(nest, nest.rows, p, share, b * d.tb),
                    _transform(nest, nest.columns, p, other, b * d.tb),
                    _multiply(nest, p, b),
                ]
            )

        blocks = loop(plan.tiles // d.tb, block, name="b")
        return seq([blocks, _results(nest, p, share, other)])

    return loop(d.cs * d.ns, task, PARALLEL if d.par else SERIAL, "p")


def _transform(nest: _Nest, operand: _Operand, p: Expr, share: Expr, first: Expr) -> Stmt:
    """A block's tiles of one operand, a vector of channels at a time."""
    plan, vl, tb = nest.plan, nest.vl, nest.decisions.tb
    extent = nest.spec.nodes[operand.node].shape[2:]
    corners = sorted(itertools.product(*({0, n - 1} for n in operand.reach)))
    raw_order = {place: k for k, place in enumerate(places(operand.reach))}
    vectors = operand.count // vl

    def tile(t: Expr) -> Stmt:
        image, *at = unlinear(first + t, plan.grid)

        def source(place: Shape) -> list[Expr]:
            every = zip(at, plan.step, place, operand.lo, strict=True)
            return [a * s + i - lo for a, s, i, lo in every]

        def inside(place: Shape) -> list[Expr]:
            found = []
            for k, position in enumerate(source(place)):
                last = (plan.grid[1 + k] - 1) * plan.step[k] + place[k] - operand.lo[k]
                found += [position >= 0] if place[k] < operand.lo[k] else []
                found += [position < extent[k]] if last >= extent[k] else []
            return found

        def vector(c: Expr, *, guarded: bool) -> Stmt:
            raw = buffer(len(raw_order) * vl, plan.con.acc_dtype, "raw", scope="local")

            def fetch(place: Shape) -> Stmt:
                def element(v: Expr) -> Stmt:
                    index = ((share * vectors + c) * vl + v, image, *source(place))
                    value = nest.reader.at(operand.node, index)
                    return store(raw, raw_order[place] * vl + v, value)

                def absent(v: Expr) -> Stmt:
                    return store(raw, raw_order[place] * vl + v, T.const(0, plan.con.acc_dtype))

                body = nest.reader.scope(lambda: [loop(vl, element, VECTORIZED, "v")])
                conditions = inside(place) if guarded else []
                if not conditions:
                    return body
                return when(T.all(*conditions), body, loop(vl, absent, VECTORIZED, "v"))

            def read(place: Shape, v: Expr) -> Expr:
                return raw[raw_order[place] * vl + v]

            def keep(place: Shape, v: Expr, value: Expr) -> Stmt:
                at = p * plan.positions + nest.order[place]
                within = T.floormod(c, operand.group)
                row = (at * vectors + c - within) * tb + t * operand.group
                return store(operand.out, (row + within) * vl + v, value)

            steps = transformed(vl, plan.con.acc_dtype, operand.matrices, read, keep)
            return seq([stack(raw), *map(fetch, raw_order), *steps])

        def channels(*, guarded: bool) -> Stmt:
            group = operand.group

            def several(g: Expr) -> Stmt:
                return loop(group, lambda j: vector(g * group + j, guarded=guarded), UNROLLED, "j")

            return loop(vectors // group, several, name="c")

        conditions = [c for place in corners for c in inside(place)]
        if not conditions:
            return channels(guarded=False)
        return when(T.all(*conditions), channels(guarded=False), channels(guarded=True))

    return loop(tb, tile, name="t")


def _multiply(nest: _Nest, p: Expr, block: Expr) -> Stmt:
    """The products of a block, position by position, added to the sums."""
    plan, d, rows, columns = nest.plan, nest.decisions, nest.rows, nest.columns
    vl, tm, bn, tb = d.vl, d.tm, d.nv * d.vl, d.tb
    acc = buffer(tm * bn, plan.con.acc_dtype, "acc", scope="local")
    zero = T.const(0, plan.con.acc_dtype)

    def each(body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
        def vector(i: Expr, j: Expr) -> Stmt:
            return loop(vl, lambda v: body(i, j, v), VECTORIZED, "v")

        return loop(tm, lambda i: loop(d.nv, lambda j: vector(i, j), UNROLLED, "j"), UNROLLED)

    def tile(w: Expr, nb: Expr, q: Expr) -> Stmt:
        at = p * plan.positions + w
        group, within = T.floordiv(q * tm, vl), T.floormod(q * tm, vl)
        first = (at * (rows.count // vl) + group) * tb
        second = (at * (columns.count // bn) + nb) * tb

        def update(t: Expr) -> Stmt:
            def step(i: Expr, j: Expr, v: Expr) -> Stmt:
                lane = j * vl + v
                a = rows.out[(first + t) * vl + within + i]
                b = columns.out[(second + t) * bn + lane]
                return store(acc, i * bn + lane, acc[i * bn + lane] + a * b)

            return each(step)

        def place(i: Expr, j: Expr, v: Expr) -> Expr:
            return (at * rows.count + q * tm + i) * columns.count + nb * bn + j * vl + v

        def write(i: Expr, j: Expr, v: Expr) -> Stmt:
            return store(nest.sums, place(i, j, v), acc[i * bn + j * vl + v])

        def add(i: Expr, j: Expr, v: Expr) -> Stmt:
            spot = place(i, j, v)
            return store(nest.sums, spot, nest.sums[spot] + acc[i * bn + j * vl + v])

        clear = each(lambda i, j, v: store(acc, i * bn + j * vl + v, zero))
        products = loop(
            tb // d.ku,
            lambda o: loop(d.ku, lambda u: update(o * d.ku + u), UNROLLED, "u"),
            name="t",
        )
        whole = plan.tiles == tb
        kept = each(write) if whole else when(block > 0, each(add), each(write))
        return seq([stack(acc), clear, products, kept])

    def position(w: Expr) -> Stmt:
        def panel(nb: Expr) -> Stmt:
            return loop(rows.count // tm, lambda q: tile(w, nb, q), name="q")

        return loop(columns.count // bn, panel, name="n")

    return loop(plan.positions, position, name="w")


def _results(nest: _Nest, p: Expr, share: Expr, other: Expr) -> Stmt:
    """The sums of all positions become the gradients of weights, each stored once."""
    plan, vl, rows, columns = nest.plan, nest.vl, nest.rows, nest.columns
    made = {place: k for k, place in enumerate(places(plan.con.m[1:]))}

    def vector(o: Expr, c: Expr) -> Stmt:
        done = buffer(len(made) * vl, plan.con.acc_dtype, "done", scope="local")

        def read(place: Shape, v: Expr) -> Expr:
            row = (p * plan.positions + nest.order[place]) * rows.count + c
            return nest.sums[row * columns.count + o * vl + v]

        def keep(place: Shape, v: Expr, value: Expr) -> Stmt:
            return store(done, made[place] * vl + v, value)

        steps = transformed(vl, plan.con.acc_dtype, plan.weight_transform(), read, keep)
        row, column = share * rows.count + c, other * columns.count + o * vl
        stored = [_store(nest, (row, column), place, (done, k * vl)) for place, k in made.items()]
        return seq([stack(done), *steps, *stored])

    def column(o: Expr) -> Stmt:  # its lines of the result fill from channel to channel
        return loop(rows.count, lambda c: vector(o, c), name="c")

    return loop(columns.count // vl, column, name="o")


def _store(nest: _Nest, at: tuple[Expr, Expr], tap: Shape, value: tuple[Buffer, int]) -> Stmt:
    """One tap of a vector of the output's channels, through the rest of the graph."""
    spec, anchor = nest.spec, nest.plan.con.anchor
    path, (row, column), (done, first) = output_path(spec, anchor), at, value
    shape, dtype = spec.nodes[path[-1]].shape, spec.nodes[anchor].dtype

    def element(v: Expr) -> Stmt:
        index: Index = along(spec, path, (row, column + v, *map(imm, tap)))
        nest.reader.overrides[anchor] = held(done, first + v, dtype)
        return nest.reader.scope(
            lambda: [store(nest.out, linear(index, shape), nest.reader.at(path[-1], index))]
        )

    return loop(nest.vl, element, VECTORIZED, "v")
