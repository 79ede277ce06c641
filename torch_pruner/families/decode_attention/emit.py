"""Emits attention of few queries: keys and values pass once, block by block, for all their rows.

A unit takes a share of the keys of one group of heads, every so many blocks of them, so that what
a mask leaves of a long cache is shared out, too. Of each block it makes the scores, raises the
running maximum of each row, scales what it has by what that changes, and adds powers times values.
What units have of a row is put together at the end, each scaled to the maximum of all: by a second
parallel loop where the keys are shared out, else by the unit itself.

Powers are taken of differences to the maximum that are at most 0. What the graph makes of that
maximum before it subtracts it (rows that see nothing) is a factor of all powers of a row, so it
comes in at the end. A block that masks rule out for all rows is not read.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.parts.reductions import combine, identity
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
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.scalar import apply
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.families.decode_attention.form import few_queries_of, plan_of, same_for_heads
from torch_pruner.families.decode_attention.tiles import (
    Nest,
    products_of,
    query_copied,
    scores_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.decode_attention.form import DecodeDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: DecodeDecisions[int], signature: Signature) -> Emitted:
    """TIR for a kernel graph that is attention of few queries."""
    few = few_queries_of(spec)
    assert few is not None
    inputs, (out,), scratch = parameters(signature)
    query, scores, scale, sums, top, total = scratch
    nest = Nest(
        spec=spec,
        few=few,
        plan=plan_of(few, decisions),
        chosen=decisions,
        reader=Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        dtype=str(sums.dtype),
        query=query,
        scores=scores,
        scale=scale,
        sums=sums,
        top=top,
        total=total,
        out=out,
        task=imm(0),
        unit=imm(0),
        group=imm(0),
    )
    body = seq([_tasks(nest), _rows_put_together(nest) if decisions.shares > 1 else None])
    return Emitted(body, inputs, [out], scratch)


def _kind(nest: Nest) -> T.ForKind:
    return PARALLEL if nest.chosen.tasks > 1 else SERIAL


def _tasks(nest: Nest) -> Stmt:
    plan, shares = nest.plan, nest.chosen.shares

    def task(p: Expr) -> Stmt:
        def step(t: Expr) -> Stmt:
            nest.task, nest.unit = p, p * plan.per_task + t
            nest.group, share = unlinear(nest.unit, (nest.few.groups, shares))
            body = _unit(nest, share)
            return body if plan.units % plan.per_task == 0 else when(nest.unit < plan.units, body)

        return loop(plan.per_task, step, name="t")

    return loop(plan.tasks, task, _kind(nest) if plan.tasks > 1 else SERIAL, name="p")


def _unit(nest: Nest, share: Expr) -> Stmt:
    """A share of the keys of one group of heads."""
    plan, shares, rows = nest.plan, nest.chosen.shares, nest.few.rows
    lowest, zero = identity(nest.spec.nodes[nest.att.top], nest.dtype), T.const(0, nest.dtype)

    def clear(r: Expr) -> Stmt:
        at = nest.row_at(r)

        def cleared(to: Buffer, vectors: int) -> Stmt:
            size = vectors * nest.vl
            return loop(
                vectors,
                lambda j: _lanes(nest, lambda v: store(to, at * size + j * nest.vl + v, zero)),
                name="j",
            )

        first = store(nest.top, at, lowest)
        return seq([first, cleared(nest.total, 1), cleared(nest.sums, plan.slots)])

    def block(i: Expr) -> Stmt:
        at = i * shares + share
        whole, rest = divmod(nest.att.keys, nest.chosen.kb)
        start = at * nest.chosen.kb
        body = _block(nest, start, nest.chosen.kb) if whole else None
        if rest:
            last = _block(nest, imm(whole * nest.chosen.kb), rest)
            ends = when(T.EQ(at, imm(whole)), last)
            body = ends if body is None else when(at < imm(whole), body, ends)
        elif plan.blocks % shares:
            body = when(at < imm(whole), seq([body]))
        return seq([body])

    parts = [query_copied(nest), loop(rows, clear, name="r")]
    parts.append(loop(-(-plan.blocks // shares), block, name="block"))
    if shares == 1:
        parts.append(loop(rows, lambda r: _row(nest, r), name="r"))
    return seq(parts)


def _block(nest: Nest, start: Expr, count: int) -> Stmt:
    """``count`` keys from ``start`` on, unless masks rule all of them out."""

    def row(r: Expr) -> Stmt:
        return _powers(nest, r, start, count)

    body = seq(
        [
            scores_of(nest, start, count),
            loop(nest.few.rows, row, name="r"),
            products_of(nest, start, count),
        ]
    )
    if not nest.few.ruling:
        return body
    seen = buffer(nest.vl, "int32", "seen", scope="local")
    test = [
        stack(seen),
        _lanes(nest, lambda v: store(seen, v, T.const(0, "int32"))),
        _looked_for(nest, start, count, seen),
        *_halved(nest, seen, lambda a, b: T.bitwise_or(a, b)),
    ]
    return seq([*test, when(seen[imm(0)] > T.const(0, "int32"), body)])


def _looked_for(nest: Nest, start: Expr, count: int, seen: Buffer) -> Stmt:
    """Marks in ``seen`` what masks leave."""
    spec, att, ruling = nest.spec, nest.att, nest.few.ruling
    alike = all(same_for_heads(spec, node) for node in ruling)
    alike = alike and att.batch[-1] % nest.few.together == 0
    zero, one = T.const(0, "int32"), T.const(1, "int32")

    def left(node: int, index: Index) -> Expr:
        value = nest.reader.at(node, index)
        if str(value.ty.dtype) == "bool":
            return T.Select(value, one, zero)
        return T.Select(T.EQ(value, T.const(-math.inf, str(value.ty.dtype))), zero, one)

    def row(r: Expr) -> Stmt:
        def element(key: Expr, v: Expr) -> Stmt:
            def emitted() -> list[Stmt]:
                index = nest.full(r, start + key)
                both = reduce(T.bitwise_and, (left(node, index) for node in ruling))
                return [store(seen, v, T.bitwise_or(seen[v], both))]

            return nest.reader.scope(emitted)

        return _over_keys(nest, count, element)

    return loop(att.queries if alike else nest.few.rows, row, name="r")


def _over_keys(nest: Nest, count: int, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
    """``body(key, lane)`` for the keys of a block, a vector at a time and then one by one."""
    vl = nest.vl
    whole, rest = divmod(count, vl)
    parts = []
    if whole:
        parts.append(loop(whole, lambda j: _lanes(nest, lambda v: body(j * vl + v, v)), name="j"))
    if rest:
        parts.append(loop(rest, lambda e: body(whole * vl + e, e), name="e"))
    return seq(parts)


def _lanes(nest: Nest, body: Callable[[Expr], Stmt]) -> Stmt:
    return loop(nest.vl, body, VECTORIZED, "v")


def _halved(nest: Nest, buf: Buffer, step: Callable[[Expr, Expr], Expr]) -> list[Stmt]:
    """Combines the lanes of a vector into its first."""
    parts, width = [], nest.vl // 2
    while width:

        def fold(v: Expr, width: int = width) -> Stmt:
            return store(buf, v, step(buf[v], buf[v + width]))

        parts.append(loop(width, fold, VECTORIZED, "v"))
        width //= 2
    return parts


def _powers(nest: Nest, r: Expr, start: Expr, count: int) -> Stmt:
    """Scores of a row and a block replaced by their powers; the row's maximum, scale and sum."""
    spec, att, reader, dtype = nest.spec, nest.att, nest.reader, nest.dtype
    most = buffer(nest.vl, dtype, "most", scope="local")
    below = buffer(1, dtype, "below", scope="local")
    added = buffer(nest.vl, dtype, "added", scope="local")
    top, row = spec.nodes[att.top], nest.row_at(r)
    scale = nest.task * nest.few.rows + r

    def masked(key: Expr, v: Expr) -> Stmt:
        at = nest.score_at(r) + key

        def emitted() -> list[Stmt]:
            wanted = value_dtype(spec.nodes[att.scores].dtype)
            reader.overrides.pop(att.masked, None)
            reader.overrides[att.scores] = lambda _: nest.scores[at].astype(wanted)
            value = reader.at(att.masked, nest.full(r, start + key))
            larger = combine(top, most[v], nest.scores[at], dtype)
            return [store(nest.scores, at, value), store(most, v, larger)]

        return reader.scope(emitted)

    def power(key: Expr, v: Expr) -> Stmt:
        at = nest.score_at(r) + key

        def emitted() -> list[Stmt]:
            reader.overrides[att.masked] = lambda _: nest.scores[at]
            for node in att.spread:
                reader.overrides[node] = lambda _: below[imm(0)]
            index = nest.full(r, start + key)
            value = reader.at(att.powers, index)
            more = store(added, v, added[v] + nest.scores[at])
            stores = [store(nest.scores, at, value), more]
            if att.factor is not None:  # of the values, not of the sum of powers
                scaled = nest.scores[at] * reader.at(att.factor, index).astype(dtype)
                stores.append(store(nest.scores, at, scaled))
            return stores

        return reader.scope(emitted)

    zero, lowest = T.const(0, dtype), identity(top, dtype)
    old, new = nest.top[row], most[imm(0)]
    changed = apply(spec.nodes[att.powers].op, [old - below[imm(0)]], dtype)

    def summed(v: Expr) -> Stmt:
        at = row * nest.vl + v
        return store(nest.total, at, nest.total[at] * nest.scale[scale] + added[v])

    return seq(
        [
            stack(most),
            stack(below),
            stack(added),
            _lanes(nest, lambda v: store(most, v, lowest)),
            _lanes(nest, lambda v: store(added, v, zero)),
            _over_keys(nest, count, masked),
            *_halved(nest, most, lambda a, b: combine(top, a, b, dtype)),
            store(most, imm(0), combine(top, old, new, dtype)),
            store(below, imm(0), _finite(new, dtype)),
            store(nest.scale, scale, changed),
            store(nest.top, row, new),
            _over_keys(nest, count, power),
            _lanes(nest, summed),
        ]
    )


def _finite(top: Expr, dtype: str) -> Expr:
    """What is subtracted from the scores of a row: its maximum, 0 while nothing is seen."""
    return T.Select(T.EQ(top, T.const(-math.inf, dtype)), T.const(0, dtype), top)


def _rows_put_together(nest: Nest) -> Stmt:
    """The rows of all groups, after all units are done."""
    shape = (nest.few.groups, nest.few.rows)

    def row(p: Expr) -> Stmt:
        nest.group, r = unlinear(p, shape)
        nest.unit = nest.group * nest.chosen.shares
        return _row(nest, r)

    return loop(math.prod(shape), row, _kind(nest), name="p")


def _row(nest: Nest, r: Expr) -> Stmt:
    """One row from what the units of its group have of it, from ``unit`` on, stored."""
    spec, att, reader, dtype = nest.spec, nest.att, nest.reader, nest.dtype
    shares, vl, powers = nest.chosen.shares, nest.vl, spec.nodes[att.powers].op
    names = ("top", "total", "below", "factor")
    top, total, below, factor = (buffer(1, dtype, n, scope="local") for n in names)
    part = buffer(shares, dtype, "part", scope="local")
    lanes = buffer(vl, dtype, "lanes", scope="local")
    zero = imm(0)

    def at(s: Expr) -> Expr:
        return (nest.unit + s) * nest.few.rows + r

    def larger(s: Expr) -> Stmt:
        both = combine(spec.nodes[att.top], top[zero], nest.top[at(s)], dtype)
        return store(top, zero, both)

    def weighed(s: Expr) -> Stmt:
        share = apply(powers, [nest.top[at(s)] - below[zero]], dtype)
        add = _lanes(
            nest, lambda v: store(lanes, v, lanes[v] + part[s] * nest.total[at(s) * vl + v])
        )
        return seq([store(part, s, share), add])

    def divided() -> list[Stmt]:
        """What the graph subtracts from scores and divides by, of the maximum and the sum."""
        here = nest.full(r, zero)
        for node in (*att.spread, att.divisor, att.powers, att.masked):
            reader.overrides.pop(node, None)
        reader.overrides[att.top] = lambda _: top[zero]
        reader.overrides[att.total] = lambda _: total[zero]
        (spread,) = att.spread
        less = reader.at(spec.nodes[spread].inputs[0], here)
        common = apply(powers, [top[zero] - less], dtype)
        over = reader.at(spec.nodes[att.divisor].inputs[0], here)
        return [
            store(factor, zero, common),
            store(total, zero, lanes[zero] * factor[zero]),
            store(factor, zero, factor[zero] / over),
        ]

    lowest = identity(spec.nodes[att.top], dtype)
    return seq(
        [
            *(stack(b) for b in (top, total, below, factor, part, lanes)),
            store(top, zero, lowest),
            loop(shares, larger, UNROLLED, "s"),
            store(below, zero, _finite(top[zero], dtype)),
            _lanes(nest, lambda v: store(lanes, v, T.const(0, dtype))),
            loop(shares, weighed, UNROLLED, "s"),
            *_halved(nest, lanes, lambda a, b: a + b),
            reader.scope(divided),
            _written(nest, r, at, part, factor),
        ]
    )


def _written(nest: Nest, r: Expr, at: Callable[[Expr], Expr], part: Buffer, factor: Buffer) -> Stmt:
    """The sums of a row through the rest of the graph."""
    spec, att, vl = nest.spec, nest.att, nest.vl
    path = output_path(spec, att.out)
    shape, batch = spec.nodes[path[-1]].shape, spec.nodes[att.out].shape[:-2]
    dtype, size = value_dtype(spec.nodes[att.out].dtype), nest.plan.slots * vl
    group, query = nest.head(r)

    def element(slot: Expr, v: Expr) -> Stmt:
        value: Expr = T.const(0, nest.dtype)
        for s in range(nest.chosen.shares):
            term = part[imm(s)] * nest.sums[at(imm(s)) * size + slot * vl + v]
            value = term if s == 0 else value + term
        place = (*unlinear(group, batch), query, nest.first_column(slot) + v)
        index = along(spec, path, place)
        nest.reader.overrides[att.out] = lambda _: (value * factor[imm(0)]).astype(dtype)
        return nest.reader.scope(
            lambda: [store(nest.out, linear(index, shape), nest.reader.at(path[-1], index))]
        )

    return loop(nest.plan.slots, lambda j: _lanes(nest, lambda v: element(j, v)), name="slot")
