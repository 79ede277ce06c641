"""The gates of a recurrence: states and cells of some units of a row after a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import VECTORIZED, Buffer, Expr, Stmt, T, loop, seq, when
from torch_pruner.codegen.tir.reader import Index, imm
from torch_pruner.codegen.tir.scalar import apply
from torch_pruner.codegen.tir.values import store

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.recurrence.form import Recurrence
    from torch_pruner.families.recurrence.nest import Nest


def pieces(units: int, vl: int) -> list[tuple[int, int]]:
    """(first, lanes) of vectors for so many units: whole ones and then powers of two."""
    found, first = [], 0
    while first < units:
        lanes = vl
        while lanes > units - first:
            lanes //= 2
        found.append((first, lanes))
        first += lanes
    return found


def states(
    nest: Nest,
    t: Expr,
    d: Expr,
    row: Expr,
    sums: tuple[Expr, Expr, Buffer],
    piece: tuple[int, int],
) -> Stmt:
    """States of some units of a row, of what was summed for them."""
    found = nest.found
    (panel, i, acc), (begin, lanes) = sums, piece
    unit = panel * nest.width + begin
    place = _place(found, t, d)
    after = nest.after(t)

    def summed(g: int, v: Expr) -> Expr:
        return (i * found.gates + g) * nest.width + begin + v

    def given(g: int, v: Expr) -> Expr:
        return nest.reader.at(found.given, (place, row, d, imm(g), unit + v))

    def of(op: str, *args: Expr) -> Expr:
        return apply(op, list(args), nest.dtype)

    def over(body: Callable[[Expr], list[Stmt]]) -> Stmt:
        return loop(lanes, lambda v: nest.reader.scope(lambda: body(v)), VECTORIZED, "v")

    def gate(g: int, op: str) -> Stmt:
        return over(lambda v: [store(acc, summed(g, v), of(op, acc[summed(g, v)] + given(g, v)))])

    def finished(v: Expr, value: Expr) -> list[Stmt]:
        kept = store(nest.state, after + nest.kept(d, row, unit + v), value)
        return [kept, nest.stored(place, d, row, unit + v, value)]

    if found.op in ("rnn_tanh", "rnn_relu"):
        op = found.op.removeprefix("rnn_")
        return seq([gate(0, op), over(lambda v: finished(v, acc[summed(0, v)]))])

    if found.op == "gru":

        def new(v: Expr) -> list[Stmt]:
            share = acc[summed(2, v)] + nest.reader.at(found.other, (d, unit + v))
            value = of("tanh", given(2, v) + acc[summed(0, v)] * share)
            return [store(acc, summed(2, v), value)]

        def mixed(v: Expr) -> list[Stmt]:
            old = nest.state[nest.before(t) + nest.kept(d, row, unit + v)]
            made = acc[summed(2, v)]
            return finished(v, made + acc[summed(1, v)] * (old - made))

        return seq([gate(0, "sigmoid"), gate(1, "sigmoid"), over(new), over(mixed)])

    assert nest.cells is not None
    cells = nest.cells

    def cell(v: Expr) -> list[Stmt]:
        at = nest.kept(d, row, unit + v)
        value = acc[summed(1, v)] * cells[at] + acc[summed(0, v)] * acc[summed(2, v)]
        return [store(cells, at, value)]

    def state(v: Expr) -> list[Stmt]:
        value = acc[summed(3, v)] * of("tanh", cells[nest.kept(d, row, unit + v)])
        return finished(v, value)

    parts = [
        *(gate(g, op) for g, op in enumerate(("sigmoid", "sigmoid", "tanh", "sigmoid"))),
        over(cell),
        over(state),
    ]
    if found.keeps_cells:

        def last(v: Expr) -> list[Stmt]:
            value = cells[nest.kept(d, row, unit + v)]
            return [nest.stored(imm(found.steps), d, row, unit + v, value)]

        parts.append(when(T.EQ(t, imm(found.steps - 1)), over(last)))
    return seq(parts)


def _place(found: Recurrence, t: Expr, d: Expr) -> Expr:
    """Which entry of the sequence a step of a direction takes."""
    backwards = found.steps - 1 - t
    reverse: Index | tuple[int, ...] = found.node.attr("reverse")
    if reverse == (0,):
        return t
    if reverse == (1,):
        return backwards
    assert reverse == (0, 1)
    return t + d * (backwards - t)
