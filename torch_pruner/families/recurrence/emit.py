"""Emits recurrences: for each step products of few rows with panels of weights, and the gates.

A panel holds some units of every gate, so that what a tile sums becomes states at once. The state
lies twice in scratch, before and after a step: tasks of a step read the one and write the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.output import output_path
from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Expr,
    Stmt,
    T,
    buffer,
    loop,
    prefetch,
    seq,
    stack,
    stepped,
    when,
)
from torch_pruner.codegen.tir.reader import Reader, imm, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.recurrence.form import constant_weights, recurrence_of
from torch_pruner.families.recurrence.gates import pieces, states
from torch_pruner.families.recurrence.nest import Nest

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.recurrence.form import RecurrenceDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


_LINE = 16  # floats


def emit(spec: Graph, decisions: RecurrenceDecisions[int], signature: Signature) -> Emitted:
    """TIR for a recurrence."""
    inputs, (out,), scratch = parameters(signature)
    found = recurrence_of(spec)
    constant = constant_weights(spec, found)
    nest = Nest(
        spec=spec,
        found=found,
        chosen=decisions,
        reader=Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        out=out,
        state=scratch[0],
        cells=scratch[1] if found.has_cells else None,
        weights=scratch[-1] if constant is None else inputs[constant[0]],
        path=output_path(spec, found.at),
    )
    packed = _packed(nest) if constant is None else None
    return Emitted(seq([packed, *_tasks(nest)]), inputs, [out], scratch)


def _tasks(nest: Nest) -> list[Stmt]:
    """All steps by each task, or a step by all tasks after another."""
    found, chosen = nest.found, nest.chosen
    kind = PARALLEL if chosen.spread else SERIAL
    shape = (found.directions, chosen.rows)

    def begun(p: Expr) -> Stmt:
        d, chunk = unlinear(p, shape)
        return _before(nest, d, chunk * nest.rows)

    if chosen.units == 1:

        def task(p: Expr) -> Stmt:
            d, chunk = unlinear(p, shape)
            steps = loop(
                found.steps, lambda t: _step(nest, t, d, chunk * nest.rows, imm(0)), name="t"
            )
            return seq([begun(p), steps])

        return [loop(found.directions * chosen.rows, task, kind, "p")]

    def part(t: Expr, p: Expr) -> Stmt:
        d, chunk, unit = unlinear(p, (*shape, chosen.units))
        return _step(nest, t, d, chunk * nest.rows, unit)

    count = found.directions * chosen.rows
    each = stepped(
        found.steps, lambda t: loop(count * chosen.units, lambda p: part(t, p), PARALLEL, "p")
    )
    return [loop(count, begun, PARALLEL, "p"), each]


def _packed(nest: Nest) -> Stmt:
    """Weights that are no constants as panels; behind the last unit it is repeated."""
    found, width, held = nest.found, nest.width, nest.chosen.gates
    kind = PARALLEL if nest.chosen.spread else SERIAL

    def panel(p: Expr) -> Stmt:
        d, number = unlinear(p, (found.directions, nest.panels))

        def gate(k: Expr, g: Expr) -> Stmt:
            group, within = T.truncdiv(g, imm(held)), T.truncmod(g, imm(held))
            at = nest.block(d, number, group) + (k * held + within) * width

            def unit(e: Expr) -> Stmt:
                column = g * found.units + T.min(number * width + e, imm(found.units - 1))
                value = nest.reader.at(found.weights, (d, k, column))
                return store(nest.weights, at + e, value)

            return loop(width, lambda e: nest.reader.scope(lambda: [unit(e)]), name="e")

        gates = lambda k: loop(found.gates, lambda g: gate(k, g), name="g")  # noqa: E731
        return loop(found.units, gates, name="k")

    return loop(found.directions * nest.panels, panel, kind, "p")


def _before(nest: Nest, d: Expr, first: Expr) -> Stmt:
    """States, and cells, before the first step."""
    found = nest.found

    def unit(row: Expr, unit: Expr) -> Stmt:
        def stores() -> list[Stmt]:
            at, index = nest.kept(d, row, unit), (d, row, unit)
            made = [store(nest.state, at, nest.reader.at(found.state, index))]
            if nest.cells is not None:
                made.append(store(nest.cells, at, nest.reader.at(found.other, index)))
            return made

        return nest.reader.scope(stores)

    def row(r: Expr) -> Stmt:
        return loop(found.units, lambda j: unit(first + r, j), name="j")

    return loop(nest.rows, row, name="r")


def _step(nest: Nest, t: Expr, d: Expr, first: Expr, chunk: Expr) -> Stmt:
    """A step of some rows and of the panels of a chunk."""
    count, chunks = nest.panels, nest.chosen.units
    each = -(-count // chunks)
    whole, rest = divmod(nest.found.units, nest.width)

    def panel(i: Expr) -> Stmt:
        p = chunk * each + i
        following = T.Select(T.EQ(i, imm(each - 1)), chunk * each, p + 1)
        full = _rows(nest, t, d, first, _Panel(p, nest.width, following)) if whole else None
        if not rest:
            body = full
        else:
            last = _rows(nest, t, d, first, _Panel(imm(whole), rest, chunk * each))
            last = when(T.EQ(p, imm(whole)), last)
            body = last if full is None else when(p < imm(whole), full, last)
        assert body is not None
        return when(p < imm(count), body) if count % chunks and not rest else body

    return loop(each, panel, name="panel")


class _Panel(NamedTuple):
    """A panel of a direction, how many of its units there are, and which comes next."""

    number: Expr
    units: int
    following: Expr


class _Rows(NamedTuple):
    """The rows of a tile, and which of all tiles that pass by a panel it is."""

    first: Expr
    many: int
    turn: Expr
    turns: int


def _rows(nest: Nest, t: Expr, d: Expr, first: Expr, panel: _Panel) -> Stmt:
    """Tiles of all rows of a task with a panel."""
    tm = nest.chosen.tm
    whole, rest = divmod(nest.rows, tm)
    turns = whole + bool(rest)

    def tile(i: Expr) -> Stmt:
        return _tile(nest, t, d, _Rows(first + i * tm, tm, i, turns), panel)

    parts = [loop(whole, tile, name="tile")] if whole else []
    if rest:
        last = _Rows(first + whole * tm, rest, imm(whole), turns)
        parts.append(_tile(nest, t, d, last, panel))
    return seq(parts)


def _fetched(
    nest: Nest, d: Expr, rows: _Rows, panel: _Panel, group: int, block: Expr
) -> list[Stmt]:
    """Fetches a share of the lines of unrolled positions, all of which the turns fetch.

    They are those of the same gates of the next panel.
    """
    size = nest.chosen.ku * nest.chosen.gates * nest.width
    begin = nest.block(d, panel.following, group)
    lines = -(-size // _LINE)
    share = -(-lines // rows.turns)
    at = begin + block * size + rows.turn * (share * _LINE)
    return [prefetch(nest.weights, at + e * _LINE) for e in range(share)]


def _tile(nest: Nest, t: Expr, d: Expr, rows: _Rows, panel: _Panel) -> Stmt:
    """States of some rows and of the units of a panel after a step.

    Sums of some gates after those of others: more rows share a weight that is loaded once.
    """
    found, nv, vl = nest.found, nest.chosen.nv, nest.vl
    row, many, number = rows.first, rows.many, panel.number
    vectors = found.gates * nv
    acc = buffer(many * vectors * vl, nest.dtype, "acc", scope="local")
    before = nest.before(t)

    held = nest.chosen.gates * nv  # vectors of a row in registers

    def each(first: int, count: int, body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
        """``body(i, j, v)`` for rows, vectors and lanes: a vector of weights is loaded once."""

        def vector(j: Expr, i: Expr) -> Stmt:
            return loop(vl, lambda v: body(i, j + first, v), VECTORIZED, "v")

        return loop(
            count, lambda j: loop(many, lambda i: vector(j, i), UNROLLED, "i"), UNROLLED, "j"
        )

    def clear(i: Expr, j: Expr, v: Expr) -> Stmt:
        return store(acc, (i * vectors + j) * vl + v, T.const(0, nest.dtype))

    ku = nest.chosen.ku
    whole, rest = divmod(found.units, ku)

    def summed(group: int) -> list[Stmt]:
        """The sums of a group of gates, over all positions of the state."""
        first = group * held

        def position(k: Expr) -> Stmt:
            base = nest.block(d, number, group) + k * (held * vl)

            def update(i: Expr, j: Expr, v: Expr) -> Stmt:
                state = nest.state[before + nest.kept(d, row + i, k)]
                to = (i * vectors + j) * vl + v
                weight = nest.weights[base + (j - first) * vl + v]
                return store(acc, to, acc[to] + state * weight)

            return each(first, held, update)

        def block(o: Expr) -> Stmt:
            fetches = _fetched(nest, d, rows, panel, group, o) if nest.chosen.ahead else []
            return seq([*fetches, loop(ku, lambda e: position(o * ku + e), UNROLLED, "e")])

        parts = [each(first, held, clear)]
        if whole:
            parts.append(loop(whole, block, name="k"))
        return [*parts, *(position(imm(whole * ku + e)) for e in range(rest))]

    parts = [stack(acc)]
    for group in range(nest.groups):
        parts += summed(group)

    def ends(i: Expr) -> Stmt:
        made = [
            states(nest, t, d, row + i, (number, i, acc), piece)
            for piece in pieces(panel.units, vl)
        ]
        return seq(made)

    return seq([*parts, loop(many, ends, UNROLLED, "i")])
