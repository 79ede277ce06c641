"""Emits row kernels: a row is reduced by vector lanes, pass by pass, and finished in cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import some_needed
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.row_passes import forward, newly_kept, row_index
from torch_pruner.codegen.parts.runs import in_runs
from torch_pruner.codegen.parts.sweeps import blocked
from torch_pruner.codegen.tir.builders import (
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
)
from torch_pruner.codegen.tir.indices import join
from torch_pruner.codegen.tir.reader import (
    Index,
    Reader,
    held,
    imm,
    linear,
    unlinear,
)
from torch_pruner.codegen.tir.values import load, store, value_dtype
from torch_pruner.families.rows.along import sweep, sweep_apart
from torch_pruner.families.rows.form import joined_axes, parted_axis, row_tasks, whole_run
from torch_pruner.graph.extents import unspecified
from torch_pruner.graph.ops import FLOATS
from torch_pruner.graph.rows import RowDomain, full_node, row_domain

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.rows.form import RowsDecisions
    from torch_pruner.graph.ir import Graph, Node
    from torch_pruner.graph.signature import Signature


@dataclass(slots=True)
class _Row:
    spec: Graph
    domain: RowDomain
    reader: Reader
    outputs: dict[int, Buffer]
    vl: int
    lanes: int  # independent vector accumulators
    parted: int | None  # the axis of a row of which each of these has a part of its own
    kept: dict[int, Buffer]  # one row of scratch per parallel task
    task: Expr
    ready: set[int]

    def index(self, row: Index, along: Index) -> Index:
        from torch_pruner.codegen.parts.reductions import merge

        return merge(row, along, self.domain.axes, len(self.domain.shape))


def emit(spec: Graph, decisions: RowsDecisions[int], signature: Signature) -> Emitted:
    """TIR for rows that are reduced, and perhaps finished."""
    inputs, outputs, scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    domain = row_domain(spec)
    chunk, tasks = row_tasks(spec, decisions)
    kept = dict(zip(domain.kept_values, scratch, strict=True))
    state = _Row(
        spec,
        domain,
        reader,
        dict(zip(spec.outputs, outputs, strict=True)),
        decisions.vl,
        decisions.lanes,
        parted_axis(spec, decisions.lanes, decisions.vl) if decisions.apart else None,
        kept,
        imm(0),
        set(),
    )

    turns = all(unspecified(spec, o) for o in spec.outputs)

    def place(p: Expr) -> Index:
        return unlinear(p, tuple(domain.shape[a] for a in domain.kept))

    def run(task: Expr, p: Expr) -> Stmt:
        state.task = task
        at = place(p)
        return some_needed(spec, reader, _begins(state, at), _emit_row(state, at))

    def row(p: Expr) -> Stmt:
        state.task = imm(0)
        if tasks > 1:
            state.task = T.floormod(p, tasks) if turns else T.floordiv(p, chunk)
        at = place(p)
        body = _emit_row(state, at)
        return some_needed(spec, reader, _begins(state, at), body) if turns else body

    body = None
    if turns and decisions.par:
        begins = partial(_begins, state)
        body = in_runs(spec, reader, domain.rows, tasks, lambda p: begins(place(p)), run)
    if body is None:
        body = blocked(domain.rows, chunk, decisions.par, row, turns=turns)
    return Emitted(body, inputs, outputs, scratch)


def _emit_row(state: _Row, row: Index) -> Stmt:
    spec, domain, reader = state.spec, state.domain, state.reader
    from torch_pruner.codegen.parts.reductions import sum_dtype

    results = {
        r: buffer(1, sum_dtype(spec.nodes[r]), f"r{r}", scope="local") for r in domain.reductions
    }
    for r, buf in results.items():
        reader.overrides[r] = held(buf, imm(0), spec.nodes[r].dtype)
    state.ready.clear()
    for k in domain.kept_values:
        reader.overrides.pop(k, None)
    parts: list[Stmt] = [stack(b) for b in results.values()]
    parts.extend(_reduce(state, r, results[r], row) for r in domain.reductions)
    parts.append(_finish(state, row))
    return seq(parts)


def _pass(
    state: _Row, row: Index, roots: list[int], body: Callable[[Index, Expr], list[Stmt]], width: int
) -> Stmt:
    """One sweep along the row: vectors of ``width`` groups of lanes, then single elements.

    ``body(index, lane)`` gives the statements for one element; ``lane`` counts within a group of
    accumulators.
    """
    domain = state.domain
    *outer, last = width_shape = tuple(domain.shape[a] for a in domain.axes)
    fresh = newly_kept(state.spec, state.domain, state.kept, state.ready, roots)
    base = state.task * domain.width

    def kept(buf: Buffer) -> Callable[[Index], Expr]:
        return lambda index: load(
            buf, base + linear(tuple(index[a] for a in domain.axes), width_shape)
        )

    def element(along: Index, lane: Expr) -> Stmt:
        index = state.index(row, along)
        at = linear(along, width_shape)

        def emit() -> list[Stmt]:
            saved = [store(state.kept[k], base + at, state.reader.at(k, index)) for k in fresh]
            return [*saved, *body(index, lane)]

        return state.reader.scope(emit)

    joined = joined_axes(state.spec, state.vl)
    run = whole_run(state.spec, state.vl) if joined == 1 else last

    def short(prefix: Index, axes: tuple[int, ...]) -> Stmt:
        def spread(along: Index, lane: Expr) -> Stmt:
            return element((*prefix, *unlinear(along[-1], axes)), lane)

        return sweep((), math.prod(axes), state.vl, width, spread)

    def runs(prefix: Index) -> Stmt:
        def one(p: Expr) -> Stmt:
            def far(along: Index, lane: Expr) -> Stmt:
                position = join((p, along[-1]), (last // run, run))
                return element((*along[:-1], position), lane)

            return sweep(prefix, run, state.vl, width, far)

        return loop(last // run, one, name="p")

    def nested(prefix: Index, rest: tuple[int, ...]) -> Stmt:
        if joined > 1 and len(rest) == joined - 1:
            return short(prefix, (*rest, last))
        if not rest and run < last:
            return runs(prefix)
        if not rest:
            return sweep(prefix, last, state.vl, width, element)
        return loop(rest[0], lambda r: nested((*prefix, r), rest[1:]), name="r")

    if state.parted is not None and width > 1 and run == last and joined == 1:
        result = sweep_apart(width_shape, state.parted, state.vl, width, element)
    else:
        result = nested((), tuple(outer))
    for k in fresh:  # later passes read what this one kept
        state.reader.overrides[k] = kept(state.kept[k])
        state.ready.add(k)
    return result


def _reduce(state: _Row, r: int, result: Buffer, row: Index) -> Stmt:
    from torch_pruner.codegen.parts.reductions import combine, identity

    node = state.spec.nodes[r]
    source = node.inputs[0]
    if node.op in ("argmax", "argmin"):
        return _locate(state, r, result, row)
    dtype = str(result.dtype)
    lanes = state.vl * state.lanes
    acc = buffer(lanes, dtype, f"acc{r}", scope="local")
    start = loop(
        state.lanes,
        lambda u: loop(
            state.vl, lambda v: store(acc, u * state.vl + v, identity(node, dtype)), VECTORIZED, "v"
        ),
        UNROLLED,
    )

    def body(index: Index, lane: Expr) -> list[Stmt]:
        value = state.reader.at(source, index).astype(dtype)
        return [store(acc, lane, combine(node, acc[lane], value, dtype))]

    sweep = _pass(state, row, [source], body, state.lanes)
    first = store(result, imm(0), identity(node, dtype))
    return seq([stack(acc), start, sweep, first, *_across(acc, lanes, state.vl, node, result)])


def _locate(state: _Row, r: int, result: Buffer, row: Index) -> Stmt:
    """The position of the first extreme element: lanes look for their own."""
    from torch_pruner.codegen.parts.extremes import (
        first_of_lanes,
        keep_extreme,
        least_extreme,
        place_dtype,
    )

    node, lanes = state.spec.nodes[r], state.vl * state.lanes
    (source,), (axis,) = node.inputs, node.attr("axes")
    dtype = value_dtype(state.spec.nodes[source].dtype)
    best = buffer(lanes, dtype, f"best{r}", scope="local")
    kind = place_dtype(state.domain.shape[axis])
    places = buffer(lanes, kind, f"places{r}", scope="local")

    def begin(v: Expr) -> Stmt:
        start = store(best, v, least_extreme(node, dtype))
        return seq([start, store(places, v, T.const(0, kind))])

    def body(index: Index, lane: Expr) -> list[Stmt]:
        value = partial(state.reader.at, source, index)
        return [keep_extreme(state.reader, node, best, places, lane, value, index[axis])]

    sweep = _pass(state, row, [source], body, state.lanes)
    start = loop(
        state.lanes,
        lambda u: loop(state.vl, lambda v: begin(u * state.vl + v), VECTORIZED, "v"),
        UNROLLED,
    )
    found = store(result, imm(0), places[imm(0)].astype(str(result.dtype)))
    ends = first_of_lanes(node, best, places, lanes)
    return seq([stack(best), stack(places), start, sweep, *ends, found])


def _across(acc: Buffer, lanes: int, vl: int, node: Node, result: Buffer) -> list[Stmt]:
    """Combine all lanes: vectors with vectors, then halves of one; one by one they would queue."""
    from torch_pruner.codegen.parts.reductions import combine

    dtype = str(result.dtype)
    parts: list[Stmt] = []

    def fold(onto: int, offset: int, width: int) -> Stmt:
        def lane(v: Expr) -> Stmt:
            both = combine(node, acc[onto + v], acc[onto + v + offset], dtype)
            return store(acc, onto + v, both)

        return loop(width, lane, VECTORIZED, "v")

    while dtype in FLOATS and lanes > 2 and lanes % 2 == 0:
        lanes //= 2
        parts += [fold(at, lanes, min(vl, lanes)) for at in range(0, lanes, vl)]
    total = loop(
        lanes,
        lambda v: store(result, imm(0), combine(node, result[imm(0)], acc[v], dtype)),
        name="lane",
    )
    return [*parts, total]


def _begins(state: _Row, row: Index) -> list[tuple[int, Index]]:
    """Every output, and where a row begins in it."""
    spec, domain = state.spec, state.domain
    start = state.index(row, tuple(imm(0) for _ in domain.axes))
    return [
        (
            o,
            row_index(spec, o, domain, row)
            if full_node(spec, o, domain.shape) is None
            else forward(spec, o, start),
        )
        for o in spec.outputs
    ]


def _finish(state: _Row, row: Index) -> Stmt:
    """Store per-row outputs, then sweep once more for the outputs that have the row's width."""
    spec, domain = state.spec, state.domain
    wide = [o for o in spec.outputs if full_node(spec, o, domain.shape) is not None]
    narrow = [o for o in spec.outputs if o not in wide]
    parts: list[Stmt] = []
    for o in narrow:

        def emit(o: int = o) -> list[Stmt]:
            index = row_index(spec, o, domain, row)
            value = state.reader.at(o, index)
            return [store(state.outputs[o], linear(index, spec.nodes[o].shape), value)]

        parts.append(state.reader.scope(emit))
    if wide:

        def body(index: Index, _: Expr) -> list[Stmt]:
            stmts = []
            for o in wide:
                at = forward(spec, o, index)
                stmts.append(
                    store(state.outputs[o], linear(at, spec.nodes[o].shape), state.reader.at(o, at))
                )
            return stmts

        parts.append(_pass(state, row, wide, body, 1))
    return seq(parts)
