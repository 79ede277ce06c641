"""Emits row kernels whose rows lie side by side in memory: each lane of a vector reduces its own.

Batch normalisation of channels-last values is the case: a row is a channel, its elements lie a
whole pixel apart, and neighbours in memory belong to neighbouring rows. A task takes a few vectors
of rows through all passes. Sums are begun anew every few hundred elements and added up, as exact
as if lanes had shared a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import some_needed
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.reductions import combine, identity, merge, sum_dtype
from torch_pruner.codegen.parts.row_passes import forward, row_index
from torch_pruner.codegen.parts.sweeps import blocked
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    Stmt,
    buffer,
    loop,
    seq,
    stack,
)
from torch_pruner.codegen.tir.reader import Index, Reader, held, imm, linear, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.graph.extents import unspecified
from torch_pruner.graph.rows import RowDomain, full_node, passes, row_domain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.families.lane_per_row.form import LanePerRowDecisions
    from torch_pruner.graph.ir import Graph, Node
    from torch_pruner.graph.signature import Signature

ANEW = 256  # elements that one accumulator adds up at most
TASKS = 64  # parallel tasks that are enough


@dataclass(slots=True)
class _Abreast:
    """``kept``: the axes that are not reduced; lanes go along the last of them."""

    spec: Graph
    domain: RowDomain
    reader: Reader
    outputs: dict[int, Buffer]

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(self.domain.shape[a] for a in self.domain.kept)

    def index(self, row: Index, along: Index) -> Index:
        return merge(row, along, self.domain.axes, len(self.domain.shape))


def emit(spec: Graph, decisions: LanePerRowDecisions[int], signature: Signature) -> Emitted:
    """TIR for rows that are neighbours in memory."""
    inputs, outputs, scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    named = dict(zip(spec.outputs, outputs, strict=True))
    state = _Abreast(spec, row_domain(spec), reader, named)
    vl, nv = decisions.vl, decisions.nv
    *outer, across = state.kept
    lines = math.prod(outer)
    turns = all(unspecified(spec, o) for o in spec.outputs)
    parts: list[Stmt] = []
    done = 0
    for vectors, lanes in ((nv, vl), (1, vl), (1, across % vl)):
        count = (across - done) // (vectors * lanes) if lanes else 0
        if not count:
            continue

        def block(
            p: Expr,
            first: int = done,
            count: int = count,
            vectors: int = vectors,
            lanes: int = lanes,
        ) -> Stmt:
            *line, at = unlinear(p, (*outer, count)) if lines * count > 1 else _zeros(state.kept)
            begin = at * (vectors * lanes) + first
            body = _block(state, tuple(line), begin, vectors, lanes)
            places = _begins(state, (*line, begin))
            return some_needed(spec, reader, places, body) if turns else body

        total = lines * count
        parts.append(blocked(total, max(1, total // TASKS), decisions.par, block, turns=turns))
        done += count * vectors * lanes
    return Emitted(seq(parts), inputs, outputs, scratch)


def _begins(state: _Abreast, row: Index) -> list[tuple[int, Index]]:
    """Of each output the first element that a row writes."""
    spec, domain = state.spec, state.domain
    found: list[tuple[int, Index]] = []
    for o in spec.outputs:
        if full_node(spec, o, domain.shape) is None:
            found.append((o, row_index(spec, o, domain, row)))
        else:
            found.append((o, forward(spec, o, state.index(row, _zeros(domain.axes)))))
    return found


def _zeros(shape: Sequence[int]) -> Index:
    return tuple(imm(0) for _ in shape)


def _block(state: _Abreast, line: Index, first: Expr, vectors: int, lanes: int) -> Stmt:
    """All passes over ``vectors * lanes`` rows that begin at ``first``."""
    spec, domain, reader = state.spec, state.domain, state.reader
    width = vectors * lanes
    totals = {
        r: buffer(width, sum_dtype(spec.nodes[r]), f"r{r}", scope="local")
        for r in domain.reductions
    }

    def rows(body: Callable[[Index, Expr], Stmt]) -> Stmt:
        """``body(row, at)`` for every row; ``at`` counts from the first."""

        def vector(u: Expr) -> Stmt:
            def lane(v: Expr) -> Stmt:
                at = u * lanes + v
                for r, total in totals.items():
                    reader.overrides[r] = held(total, at, spec.nodes[r].dtype)
                return body((*line, first + at), at)

            return loop(lanes, lane, VECTORIZED, "v")

        return loop(vectors, vector, UNROLLED, "u")

    parts: list[Stmt] = [stack(total) for total in totals.values()]
    parts += [
        _reduce(state, [(r, totals[r]) for r in group], rows, width) for group in passes(spec)
    ]
    parts.append(_finish(state, rows))
    return seq(parts)


def _reduce(
    state: _Abreast,
    wanted: Sequence[tuple[int, Buffer]],
    rows: Callable[[Callable[[Index, Expr], Stmt]], Stmt],
    width: int,
) -> Stmt:
    """One pass over the rows, for reductions that do not need each other."""
    spec, reader = state.spec, state.reader
    nodes = [spec.nodes[r] for r, _ in wanted]
    sums = [buffer(width, str(total.dtype), f"part{r}", scope="local") for r, total in wanted]

    def clear(buffers: Sequence[Buffer]) -> Stmt:
        def start(_row: Index, at: Expr) -> Stmt:
            return seq(
                [
                    store(buf, at, identity(node, str(buf.dtype)))
                    for buf, node in zip(buffers, nodes, strict=True)
                ]
            )

        return rows(start)

    def add(along: Index) -> Stmt:
        def one(row: Index, at: Expr) -> Stmt:
            index = state.index(row, along)

            def stores() -> list[Stmt]:
                return [
                    _combined(reader, node, buf, at, index)
                    for buf, node in zip(sums, nodes, strict=True)
                ]

            return reader.scope(stores)

        return rows(one)

    def gather() -> Stmt:
        def one(_row: Index, at: Expr) -> Stmt:
            return seq(
                [
                    store(total, at, combine(node, total[at], buf[at], str(buf.dtype)))
                    for (_, total), buf, node in zip(wanted, sums, nodes, strict=True)
                ]
            )

        return rows(one)

    def part(body: Stmt) -> Stmt:
        return seq([clear(sums), body, gather()])

    totals = [total for _, total in wanted]
    extents = tuple(state.domain.shape[a] for a in state.domain.axes)
    body = _in_parts(extents, add, part)
    return seq([*(stack(buf) for buf in sums), clear(totals), body])


def _combined(reader: Reader, node: Node, buf: Buffer, at: Expr, index: Index) -> Stmt:
    dtype = str(buf.dtype)
    value = reader.at(node.inputs[0], index).astype(dtype)
    return store(buf, at, combine(node, buf[at], value, dtype))


def _in_parts(
    extents: tuple[int, ...], body: Callable[[Index], Stmt], part: Callable[[Stmt], Stmt]
) -> Stmt:
    """Loops over ``extents`` around ``body``; ``part`` is around each stretch of up to ``ANEW``."""
    inner = len(extents)
    while inner and math.prod(extents[inner - 1 :]) <= ANEW:
        inner -= 1

    def within(prefix: Index) -> Stmt:
        return _nest(extents[inner:], lambda rest: body((*prefix, *rest)))

    if inner == len(extents) and inner:  # one axis alone is too long: in stretches of it
        *outer, last = extents
        whole, rest = divmod(last, ANEW)

        def stretches(prefix: Index) -> Stmt:
            def stretch(o: Expr) -> Stmt:
                return part(loop(ANEW, lambda k: body((*prefix, o * ANEW + k)), name="k"))

            parts = [loop(whole, stretch, name="o")]
            if rest:
                at = whole * ANEW
                parts.append(part(loop(rest, lambda k: body((*prefix, at + k)), name="k")))
            return seq(parts)

        return _nest(tuple(outer), stretches)
    return _nest(extents[:inner], lambda prefix: part(within(prefix)))


def _nest(extents: tuple[int, ...], body: Callable[[Index], Stmt]) -> Stmt:
    def visit(done: Index, rest: tuple[int, ...]) -> Stmt:
        if not rest:
            return body(done)
        return loop(rest[0], lambda r: visit((*done, r), rest[1:]), name="r")

    return visit((), extents)


def _finish(state: _Abreast, rows: Callable[[Callable[[Index, Expr], Stmt]], Stmt]) -> Stmt:
    """Outputs with a value per row, then those that are as wide as the rows."""
    spec, domain, reader = state.spec, state.domain, state.reader
    wide = [o for o in spec.outputs if full_node(spec, o, domain.shape) is not None]
    parts: list[Stmt] = []
    for o in spec.outputs:
        if o in wide:
            continue

        def narrow(row: Index, _at: Expr, o: int = o) -> Stmt:
            index = row_index(spec, o, domain, row)
            place = linear(index, spec.nodes[o].shape)
            return reader.scope(lambda: [store(state.outputs[o], place, reader.at(o, index))])

        parts.append(rows(narrow))
    if wide:

        def element(along: Index) -> Stmt:
            def one(row: Index, _at: Expr) -> Stmt:
                index = state.index(row, along)

                def stores() -> list[Stmt]:
                    found = []
                    for o in wide:
                        at = forward(spec, o, index)
                        place = linear(at, spec.nodes[o].shape)
                        found.append(store(state.outputs[o], place, reader.at(o, at)))
                    return found

                return reader.scope(stores)

            return rows(one)

        parts.append(_nest(tuple(domain.shape[a] for a in domain.axes), element))
    return seq(parts)
