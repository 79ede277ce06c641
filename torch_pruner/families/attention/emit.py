"""Emits attention: products with keys, softmax and products with values, tile of queries by tile.

Lanes hold queries while scores are made: a tile of ``tm`` keys by ``nv`` vectors of queries, keys
read in place as scalars, queries transposed once. So the softmax needs no sum across lanes, and the
products with the values read powers as scalars and values as vectors, in place both; where values
have fewer columns than a vector has lanes it is the other way round (``products``). The scores of
one tile live in scratch of the thread; the softmax is the exact one of two passes. Dividing by its
sum is left to the end, when there are fewer elements. Queries that do not fill a tile repeat the
last one and are dropped at the store; columns that do not fill a vector are computed twice.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.attention_tile import (
    Nest,
    counted,
    first_column,
    kept,
    key_at,
    key_of,
    of_constant,
    over_lanes,
    pack_keys,
    pack_mask,
    pack_queries,
    pack_values,
)
from torch_pruner.codegen.parts.beyond import beyond, unless
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.parts.pair_words import with_words
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
    index_dtype,
    loop,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.values import load, store, value_dtype
from torch_pruner.families.attention.pairs import added_to_scores
from torch_pruner.families.attention.products import columns_of_queries, rows_of_queries
from torch_pruner.families.attention.visible import end, leave_out, see
from torch_pruner.graph.attention import AttentionPlan, attention_of, attention_plan
from torch_pruner.graph.attention_masks import (
    constant_masks,
    hiding_mask,
)
from torch_pruner.graph.extents import unwritten

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.attention.form import AttentionDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: AttentionDecisions[int], signature: Signature) -> Emitted:
    """TIR for a kernel graph that is attention."""
    att = attention_of(spec)
    assert att is not None
    inputs, (out, *others), scratch = parameters(signature)
    plan = attention_plan(spec, att, decisions)
    scores, query, sums, *rest = scratch
    pack = decisions.pack
    values, keys, masks = rest[0] if pack else None, rest[1] if pack > 1 else None, rest[pack:]
    hiding = hiding_mask(spec, att)
    hiding = hiding if hiding in plan.masks else None
    seen = None if hiding is None else masks.pop()
    lanes, dtype = plan.lanes, str(scores.dtype)
    nest = Nest(
        spec=spec,
        att=att,
        plan=plan,
        reader=Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        vl=decisions.vl,
        nv=decisions.nv,
        tm=min(decisions.tm, att.keys),
        most=min(decisions.tm, att.keys),
        tr=min(decisions.tr, lanes),
        nc=min(decisions.nc, plan.slots),
        turned=bool(decisions.turned),
        kb=min(decisions.kb, att.keys),
        dtype=dtype,
        scores=scores,
        query=query,
        sums=sums,
        values=values,
        keys=keys,
        pairs=bool(decisions.pairs),
        masks=dict(zip(plan.masks, masks, strict=True)),
        packed={
            node: (inputs[mask.index], mask.batch)
            for node, mask in constant_masks(spec, att).items()
            if node not in plan.masks
        },
        hiding=hiding,
        seen=seen,
        top=buffer(lanes, dtype, "top", scope="local"),
        total=buffer(lanes, dtype, "total", scope="local"),
        spread={
            n: buffer(lanes, dtype, f"row{n}", scope="local") for n in (*att.spread, att.divisor)
        },
        out=out,
        row=others[0] if others else None,
        task=imm(0),
        group=imm(0),
        first=imm(0),
        end=imm(att.keys),
        rows=lanes,
        unwritten=unwritten(spec, output_path(spec, att.out)),
    )
    leave_out(nest)
    body = _tasks(nest, decisions.order)
    body = with_words(body) if nest.pairs else body
    return Emitted(body, inputs, [out, *others], scratch)


def _last(nest: Nest) -> Nest:
    """The same for the last tile, where it has fewer queries: as few vectors as they take, and as
    many more keys to a tile of scores."""
    rest = nest.att.queries % nest.lanes
    vectors = -(-rest // nest.vl)
    keys = min(nest.tm * nest.nv // vectors, nest.att.keys)
    lanes = vectors * nest.vl
    nest.most = max(nest.most, keys)
    return replace(
        nest,
        nv=vectors,
        tm=keys,
        tr=min(nest.tr, rest),
        rows=rest,
        top=buffer(lanes, nest.dtype, "top", scope="local"),
        total=buffer(lanes, nest.dtype, "total", scope="local"),
        spread={n: buffer(lanes, nest.dtype, f"row{n}", scope="local") for n in nest.spread},
    )


def _tasks(nest: Nest, order: int) -> Stmt:
    """Tasks run in parallel; each takes a run of units (one tile of queries of one head)."""
    att, plan = nest.att, nest.plan
    last = _last(nest) if att.queries % nest.lanes else None
    heads = att.batch[-1] if att.batch else 1
    # Tiles that see fewer keys are done sooner: each task takes all of them, for some of the heads.
    uneven = nest.hiding is not None or nest.unwritten
    parts = math.gcd(heads, plan.tasks) if uneven else 1

    def task(p: Expr) -> Stmt:
        def step(t: Expr) -> Stmt:
            unit = p * plan.per_task + t
            if order == 0:
                nest.group, tile = unlinear(unit, (att.groups, plan.tiles))
                copying, masks = _first_or(tile, t, plan), None
            else:
                shape = (att.groups // heads, parts, plan.tiles, heads // parts)
                outer, part, tile, head = unlinear(unit, shape)
                nest.group = (outer * parts + part) * (heads // parts) + head
                copying, masks = None, _first_or(head, t, plan)
            nest.task, nest.first = p, tile * nest.lanes

            def body(of: Nest) -> Stmt:
                of.task, of.group, of.first = nest.task, nest.group, nest.first
                of.end = imm(att.keys) if of.counted is None else of.counted
                if att.causal:
                    of.end = T.min(of.first + of.rows, of.end)
                return unless(_beyond(of), _unit(of, copying, masks))

            if last is None:
                either = body(nest)
            elif plan.tiles == 1:
                either = body(last)
            else:
                either = when(tile < plan.tiles - 1, body(nest), body(last))
            return either if plan.units % plan.per_task == 0 else when(unit < plan.units, either)

        return loop(plan.per_task, step, name="t")

    return loop(plan.tasks, task, PARALLEL if plan.tasks > 1 else SERIAL, name="p")


def _beyond(nest: Nest) -> Expr | None:
    """Whether nobody needs the open unit."""
    if not nest.unwritten:
        return None
    node = nest.spec.nodes[nest.att.out]

    def at(query: Expr) -> Expr:
        return linear((*unlinear(nest.group, node.shape[:-2]), query, imm(0)), node.shape)

    first, last = at(nest.first), at(nest.query_at(imm(nest.lanes - 1)))
    return beyond(nest.reader, nest.unwritten, node.numel, first, last)


def _first_or(position: Expr, turn: Expr, plan: AttentionPlan) -> Expr | None:
    """Whether this is position 0 or the task's first unit; None when it always is."""
    return T.any(T.EQ(position, imm(0)), T.EQ(turn, imm(0))) if plan.per_task > 1 else None


def _unit(nest: Nest, head: Expr | None, fresh: Expr | None) -> Stmt:
    """One tile of queries; ``head`` and ``fresh``: when copies of values and masks are made."""
    parts = [stack(b) for b in (nest.top, nest.total, *nest.spread.values())]
    if nest.masks:
        tiles = seq([pack_mask(nest, node) for node in nest.masks])
        tiles = tiles if nest.hiding is None else seq([tiles, see(nest)])
        parts.append(tiles if fresh is None else when(fresh, tiles))
    parts.append(pack_queries(nest))
    if nest.hiding is not None:
        last = buffer(1, index_dtype(), "end", scope="local")
        parts += [stack(last), end(nest, last)]
        nest.end = last[imm(0)]
    every = head is not None
    copies = [pack_values(nest, nest.values, every=every)] if nest.values is not None else []
    copies += [pack_keys(nest, nest.keys, every=every)] if nest.keys is not None else []
    if copies:
        parts.append(seq(copies) if head is None else when(head, seq(copies)))
    lowest = identity(nest.spec.nodes[nest.att.top], nest.dtype)
    parts.append(over_lanes(nest, lambda v: store(nest.top, v, lowest)))
    parts.append(_scores(nest))
    parts.extend(_softmax(nest))
    if nest.row is not None:
        parts.append(_write_row(nest, nest.row))
    parts.append(_write(nest))
    return seq(parts)


def _scores(nest: Nest) -> Stmt:
    """Scores of all keys that the tile sees, and their maximum."""
    whole, rest = divmod(nest.att.keys, nest.tm)

    def tile(t: Expr) -> Stmt:
        return _score_tile(nest, t * nest.tm, nest.tm, nest.att.masked)

    if (unmasked := nest.open) is not None:  # all keys of a tile count, but for the last one's
        before = T.floordiv(nest.end, nest.tm)

        def every(t: Expr) -> Stmt:
            return _score_tile(nest, t * nest.tm, nest.tm, unmasked)

        cut = when(T.all(before < whole, before * nest.tm < nest.end), tile(before))
        parts = [counted(before, every, "tile"), cut]
    elif nest.bounded:
        count = T.min(T.floordiv(nest.end + (nest.tm - 1), nest.tm), imm(whole))
        parts = [counted(count, tile, "tile")]
    else:
        parts = [loop(whole, tile, name="tile")]
    if rest:
        last = _score_tile(nest, imm(whole * nest.tm), rest, nest.att.masked)
        parts.append(when(nest.end > whole * nest.tm, last) if nest.bounded else last)
    return seq(parts)


def _score_tile(nest: Nest, first: Expr, rows: int, masked: int) -> Stmt:
    """Scores of ``rows`` keys from ``first`` on, as the node ``masked`` has them."""
    spec, att, keys, lanes = nest.spec, nest.att, nest.keys, nest.lanes
    acc = buffer(rows * lanes, nest.dtype, "acc", scope="local")

    def each(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        return loop(rows, lambda i: over_lanes(nest, lambda v: body(i, v)), UNROLLED, "i")

    def depth(d: Expr) -> Stmt:
        if nest.pairs:
            assert keys is not None
            return added_to_scores(nest, acc, (keys, first, rows), d)

        def step(i: Expr, v: Expr) -> Stmt:
            if keys is None:
                key = key_of(nest, first + i, d)
            else:
                key = load(keys, key_at(nest, first + i, d))
            query = load(nest.query, nest.query_lane(d, v))
            return store(acc, i * lanes + v, acc[i * lanes + v] + key * query)

        return each(step)

    def finish(i: Expr, v: Expr) -> Stmt:
        key = first + i
        at = nest.score_at(key, v)
        reader = nest.reader

        def emitted() -> list[Stmt]:
            dtype = value_dtype(spec.nodes[att.scores].dtype)
            reader.overrides[att.scores] = lambda _: acc[i * lanes + v].astype(dtype)
            for node, copy in nest.masks.items():
                reader.overrides[node] = kept(copy, at)
            for node in nest.packed:
                reader.overrides[node] = of_constant(nest, node, key, v)
            value = reader.at(masked, nest.full(key, v))
            top = combine(spec.nodes[att.top], nest.top[v], nest.scores[at], nest.dtype)
            return [store(nest.scores, at, value), store(nest.top, v, top)]

        return reader.scope(emitted)

    zero = T.const(0, nest.dtype)
    return seq(
        [
            stack(acc),
            each(lambda i, v: store(acc, i * lanes + v, zero)),
            loop(nest.steps, depth, name="d"),
            each(finish),
        ]
    )


def _softmax(nest: Nest) -> list[Stmt]:
    """Replace scores by powers, add these up and multiply them by values; then what the products
    are to be divided by."""
    spec, att, reader = nest.spec, nest.att, nest.reader

    def row(node: int, v: Expr) -> Stmt:
        """A function of one row's maximum or sum, for its broadcasts."""
        reader.overrides.pop(node, None)
        reader.overrides[att.top] = lambda _: nest.top[v]
        reader.overrides[att.total] = lambda _: nest.total[v]
        at = nest.full(imm(0), v)
        return reader.scope(
            lambda: [store(nest.spread[node], v, reader.at(spec.nodes[node].inputs[0], at))]
        )

    zero, one = T.const(0, nest.dtype), T.const(1, nest.dtype)
    divisor = nest.spread[att.divisor]
    return [
        *(over_lanes(nest, lambda v, n=node: row(n, v)) for node in att.spread),  # type: ignore[misc]
        over_lanes(nest, lambda v: store(nest.total, v, zero)),
        *(columns_of_queries(nest) if nest.turned else rows_of_queries(nest)),
        over_lanes(nest, lambda v: row(att.divisor, v)),
        over_lanes(nest, lambda v: store(divisor, v, one / divisor[v])),
    ]


def _write_row(nest: Nest, to: Buffer) -> Stmt:
    """The number of each query that others read."""
    spec, att, reader = nest.spec, nest.att, nest.reader
    assert att.row is not None
    path, own = output_path(spec, att.row, 1), spec.nodes[att.row].shape
    shape = spec.nodes[path[-1]].shape

    def element(i: Expr) -> Stmt:
        number = nest.group * att.queries + nest.first + i
        index = along(spec, path, unlinear(number, own))
        reader.overrides[att.top] = lambda _: nest.top[i]
        reader.overrides[att.total] = lambda _: nest.total[i]
        return reader.scope(lambda: [store(to, linear(index, shape), reader.at(path[-1], index))])

    return loop(nest.rows, element, name="i")


def _write(nest: Nest) -> Stmt:
    """The sums, divided, through the rest of the graph."""
    spec, att, plan = nest.spec, nest.att, nest.plan
    path = output_path(spec, att.out)
    shape, batch = spec.nodes[path[-1]].shape, spec.nodes[att.out].shape[:-2]
    width = plan.slots * plan.column
    dtype = value_dtype(spec.nodes[att.out].dtype)

    def element(i: Expr, slot: Expr, v: Expr) -> Stmt:
        here = first_column(nest, slot) + v
        index = along(spec, path, (*unlinear(nest.group, batch), nest.first + i, here))
        if nest.turned:
            at = nest.of_task(width) + slot * nest.lanes + i
        else:
            at = nest.of_task(width) + i * width + slot * plan.column + v
        scale = nest.spread[att.divisor][i]
        nest.reader.overrides[att.out] = lambda _: (nest.sums[at] * scale).astype(dtype)
        return nest.reader.scope(
            lambda: [store(nest.out, linear(index, shape), nest.reader.at(path[-1], index))]
        )

    def row(i: Expr) -> Stmt:
        def vector(slot: Expr) -> Stmt:
            return loop(plan.column, lambda v: element(i, slot, v), VECTORIZED, "v")

        return loop(plan.slots, vector, name="slot")

    return loop(nest.rows, row, name="i")
