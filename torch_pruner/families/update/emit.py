"""Emits updates: a sweep that copies, unless the result lies where the value did, and the rows.

Rows for one place follow one another on one thread, so that the last of them stays. Where rows are
added, a task has columns of its own and passes all rows over them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.parts.sweeps import over_blocks, store_outputs
from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    VECTORIZED,
    Buffer,
    Expr,
    Stmt,
    loop,
    seq,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, linear, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.update.form import lanes_of_columns, update_of

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[Index], Stmt]

    from torch_pruner.families.update.form import UpdateDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: UpdateDecisions[int], signature: Signature) -> Emitted:
    """TIR for an update."""
    inputs, outputs, scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    at = update_of(spec)
    if spec.nodes[at].op == "accumulate":
        return Emitted(_added(spec, reader, outputs[0], decisions), inputs, outputs, scratch)
    parts = [] if spec.nodes[at].attr("in_place") else [_copied(spec, reader, outputs, decisions)]
    parts.append(_rows(spec, reader, outputs[0], decisions))
    return Emitted(seq(parts), inputs, outputs, scratch)


def _copied(
    spec: Graph, reader: Reader, outputs: list[Buffer], decisions: UpdateDecisions[int]
) -> Stmt:
    """The result as if there were no rows."""
    at = update_of(spec)
    x = spec.nodes[at].inputs[0]
    before = Reader(spec, reader.buffers, {at: lambda index: before.at(x, index)})

    def block(index: Callable[[Expr], Index], lanes: int) -> Stmt:
        return loop(
            lanes, lambda v: store_outputs(spec, before, outputs, index(v)), VECTORIZED, "v"
        )

    shape = spec.nodes[spec.outputs[0]].shape
    return over_blocks(shape, decisions.vl, decisions.chunk, decisions.par, block)


def _rows(spec: Graph, reader: Reader, out: Buffer, decisions: UpdateDecisions[int]) -> Stmt:
    """The rows at their positions, those of one line one after another."""
    at = update_of(spec)
    node = spec.nodes[at]
    _, rows, *indices = node.inputs
    dim, places = node.attr("dim"), spec.nodes[indices[0]].shape
    lead, tail = node.shape[:dim], node.shape[dim + len(indices) :]
    path, final = output_path(spec, at), spec.nodes[spec.outputs[0]].shape

    def block(index: Callable[[Expr], Index], lanes: int) -> Stmt:
        def one(m: Expr) -> Stmt:
            place = unlinear(m, places)

            def stores() -> list[Stmt]:
                found = [
                    reader.position(i, place, node.shape[dim + k]) for k, i in enumerate(indices)
                ]

                def lane(v: Expr) -> Stmt:
                    line = index(v)
                    before, after = line[: len(lead)], line[len(lead) :]
                    target = along(spec, path, (*before, *found, *after))

                    def value() -> list[Stmt]:
                        row = reader.at(rows, (*before, *place, *after))
                        return [store(out, linear(target, final), row)]

                    return reader.scope(value)

                return [loop(lanes, lane, VECTORIZED, "v")]

            return reader.scope(stores)

        return loop(math.prod(places), one, name="m")

    return over_blocks((*lead, *tail), decisions.vl, decisions.chunk, decisions.par, block)


def _added(spec: Graph, reader: Reader, out: Buffer, decisions: UpdateDecisions[int]) -> Stmt:
    """Rows added to a copy, by tasks of a few vectors of every row."""
    at = update_of(spec)
    node = spec.nodes[at]
    x, rows, *indices = node.inputs
    dim, places = node.attr("dim"), spec.nodes[indices[0]].shape
    own = node.shape[dim : dim + len(indices)]
    columns = (*node.shape[:dim], *node.shape[dim + len(indices) :])
    lanes = lanes_of_columns(node.shape[dim + len(indices) :], decisions.vl)
    path, final = output_path(spec, at), spec.nodes[spec.outputs[0]].shape
    wide = columns[-1] // lanes if columns else 1
    vectors = math.prod(columns) // lanes
    chunk = min(decisions.chunk if decisions.par else vectors, vectors)

    def column(vector: Expr, v: Expr) -> Index:
        if lanes == 1:
            return unlinear(vector, columns)
        *line, block = unlinear(vector, (*columns[:-1], wide))
        return (*line, block * lanes + v)

    def passed(p: Expr, extents: tuple[int, ...], make: Callable[[Index], Step]) -> Stmt:
        """All vectors of a task for each of ``extents``."""

        def line(m: Expr) -> Stmt:
            def vector_of(step: Step, q: Expr) -> Stmt:
                vector = p * chunk + q
                body = loop(lanes, lambda v: step(column(vector, v)), VECTORIZED, "v")
                return body if vectors % chunk == 0 else when(vector < vectors, body)

            def stores() -> list[Stmt]:
                step = make(unlinear(m, extents))
                return [loop(chunk, lambda q: vector_of(step, q), name="q")]

            return reader.scope(stores)

        return loop(math.prod(extents), line, name="m")

    def target(before: Index, found: Index) -> Expr:
        return linear(along(spec, path, (*before[:dim], *found, *before[dim:])), final)

    def copied(place: Index) -> Step:
        return lambda c: reader.scope(
            lambda: [store(out, target(c, place), reader.at(x, (*c[:dim], *place, *c[dim:])))]
        )

    def added(place: Index) -> Step:
        found = tuple(reader.position(i, place, n) for i, n in zip(indices, own, strict=True))

        def one(c: Index) -> Stmt:
            def value() -> list[Stmt]:
                where = target(c, found)
                row = reader.at(rows, (*c[:dim], *place, *c[dim:]))
                return [store(out, where, out[where] + row)]

            return reader.scope(value)

        return one

    def task(p: Expr) -> Stmt:
        return seq([passed(p, own, copied), passed(p, places, added)])

    kind = PARALLEL if decisions.par else SERIAL
    return loop(-(-vectors // chunk), task, kind, "p")
