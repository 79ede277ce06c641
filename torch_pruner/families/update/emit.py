"""Emits updates: a sweep that copies, unless the result lies where the value did, and the rows.

Rows for one place follow one another on one thread, so that the last of them stays.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.parts.sweeps import over_blocks, store_outputs
from torch_pruner.codegen.tir.builders import VECTORIZED, Buffer, Expr, Stmt, loop, seq
from torch_pruner.codegen.tir.reader import Index, Reader, linear, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.update.form import update_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.update.form import UpdateDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: UpdateDecisions[int], signature: Signature) -> Emitted:
    """TIR for an update."""
    inputs, outputs, scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    at = update_of(spec)
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
