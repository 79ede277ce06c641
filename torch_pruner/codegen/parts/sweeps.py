"""Sweeps over an output in vectors of its innermost axis, shared out to parallel tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    Buffer,
    Expr,
    Stmt,
    loop,
    seq,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.values import store

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Shape


def store_outputs(spec: Graph, reader: Reader, outputs: Sequence[Buffer], index: Index) -> Stmt:
    """Every output at ``index`` (the outputs have one shape).

    All values are there before the first is stored: it may replace what others are made of
    (``graph/overwrites.py``).
    """

    def stores() -> list[Stmt]:
        values = [reader.at(node, index) for node in spec.outputs]
        if len(values) > 1:
            values = [reader.held(value) for value in values]
        return [
            store(out, linear(index, spec.nodes[node].shape), value)
            for node, out, value in zip(spec.outputs, outputs, values, strict=True)
        ]

    return reader.scope(stores)


Block = Callable[[Callable[[Expr], Index], int], Stmt]
Around = Callable[[Index, Stmt], Stmt]


def over_blocks(
    shape: Shape,
    vl: int,
    chunk: int,
    parallel: int,
    block: Block,
    around: Around | None = None,
    reader: Reader | None = None,
) -> Stmt:
    """Loops over ``shape`` in vectors of ``vl`` elements along the innermost axis.

    ``chunk`` vectors make a task, where tasks are ``parallel``. ``around`` puts a condition around
    a line, by the position of its first element; lines are dealt in turns then. What ``reader``
    reads and a line has in common is computed once a line.

    ``block(index, lanes)`` emits one vector: ``index(v)`` is the position of lane v. Remainders are
    blocks of one lane.
    """
    inner = shape[-1] if shape else 1
    lead: tuple[int, ...] = shape[:-1]
    if inner < 2 * vl:  # short rows: vectors may cross them
        inner, lead = math.prod(shape), ()

    def at(line: Index, position: Expr) -> Index:
        return unlinear(position, shape) if not lead and len(shape) != 1 else (*line, position)

    whole, rest = divmod(inner, vl)

    def vector(line: Index, o: Expr) -> Stmt:
        return block(lambda v: at(line, o * vl + v), vl)

    def tail(line: Index) -> Stmt | None:
        if not rest:
            return None
        return loop(rest, lambda e: block(lambda _: at(line, imm(whole * vl) + e), 1), name="rest")

    if math.prod(lead) == 1:
        line: Index = tuple(imm(0) for _ in lead)
        body = blocked(whole, chunk, parallel, lambda o: vector(line, o)) if whole else None
        return seq([body, tail(line)])

    def one_line(p: Expr) -> Stmt:
        line = unlinear(p, lead)

        def along() -> Stmt:
            vectors = loop(whole, lambda o: vector(line, o), name="o") if whole else None
            return seq([vectors, tail(line)])

        body = along() if reader is None else reader.line(line, along)
        return body if around is None else around((*line, imm(0)), body)

    lines = max(1, chunk // max(whole, 1))
    return blocked(math.prod(lead), lines, parallel, one_line, turns=around is not None)


def blocked(
    extent: int,
    chunk: int,
    parallel: int,
    body: Callable[[Expr], Stmt],
    *,
    turns: bool = False,
) -> Stmt:
    """A loop over ``extent`` cut into parallel tasks of ``chunk`` iterations.

    With ``turns`` task p of n does iterations p, p + n, p + 2 n and so on, else a run of them.
    """
    if not parallel:
        return loop(extent, body, SERIAL, "p")
    chunk = max(1, min(chunk, extent))
    tasks = -(-extent // chunk)

    def task(p: Expr) -> Stmt:
        def step(q: Expr) -> Stmt:
            at = q * tasks + p if turns else p * chunk + q
            return body(at) if extent % chunk == 0 else when(at < extent, body(at))

        return loop(chunk, step, SERIAL, "q")

    return loop(tasks, task, PARALLEL, "p")
