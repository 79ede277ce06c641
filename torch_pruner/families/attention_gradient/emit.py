"""Emits the gradient of attention: tiles of queries by blocks of keys, weights made again.

Lanes hold queries while weights and their gradient are made, as in ``families/attention``: a
register tile of ``tm`` keys by ``nv`` vectors of queries, keys and values read as scalars, queries
and the result's gradient turned once a tile. What they lead to has columns in lanes: rows of keys
are summed over the tile's queries, rows of queries over the block's keys. Sums wait in scratch
between tiles and are written once. A task has whole heads, so no two share sums.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.attention_tile import counted, in_blocks
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.parts.pair_words import WORD, with_words
from torch_pruner.codegen.parts.transposed import in_square, turns
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
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.attention_gradient.form import plan_of
from torch_pruner.families.attention_gradient.nest import Nest, Part
from torch_pruner.families.attention_gradient.tiles import gradients, weights

if TYPE_CHECKING:
    from torch_pruner.families.attention_gradient.form import AttentionGradientDecisions, Columns
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: AttentionGradientDecisions[int], signature: Signature) -> Emitted:
    """TIR for a kernel graph that is the gradient of attention."""
    plan = plan_of(spec, decisions)
    inputs, outputs, scratch = parameters(signature)
    parts = [
        Part(b, s.shape[1] * s.shape[2]) for b, s in zip(scratch, signature.scratch, strict=True)
    ]
    rest = plan.found.queries % plan.lanes

    def nest(vectors: int, rows: int) -> Nest:
        lanes = vectors * decisions.vl
        return Nest(
            spec=spec,
            plan=plan,
            reader=Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
            vl=decisions.vl,
            vectors=vectors,
            rows=rows,
            nv=decisions.nv,
            tm=min(decisions.tm, plan.found.keys),
            tr=min(decisions.tr, rows),
            nc=decisions.nc,
            keys=parts[0],
            values=parts[1],
            into_keys=parts[2],
            into_values=parts[3],
            powers=parts[4],
            changes=parts[5],
            turned_queries=parts[6],
            turned_grads=parts[7],
            queries=parts[8],
            grads=parts[9],
            into_queries=parts[10],
            lines=parts[11],
            by_keys=parts[12] if decisions.pairs else None,
            spread={
                n: buffer(lanes, "float32", f"row{n}", scope="local") for n in plan.found.spread
            },
        )

    whole = nest(decisions.qp * decisions.nv, plan.lanes)
    last = nest(-(-rest // decisions.vl), rest) if rest else None
    body = _tasks(whole, last, outputs)
    body = with_words(body) if decisions.pairs else body
    return Emitted(body, inputs, outputs, scratch)


def _tasks(whole: Nest, last: Nest | None, outputs: list[Buffer]) -> Stmt:
    plan = whole.plan
    found = plan.found

    def task(p: Expr) -> Stmt:
        def head(t: Expr) -> Stmt:
            group = p * plan.per_task + t
            for nest in (whole, last) if last is not None else (whole,):
                nest.task, nest.group = p, group
            body = _head(whole, last, outputs)
            return body if found.groups % plan.per_task == 0 else when(group < found.groups, body)

        return loop(plan.per_task, head, name="t")

    return loop(plan.tasks, task, PARALLEL if plan.tasks > 1 else SERIAL, name="p")


def _head(whole: Nest, last: Nest | None, outputs: list[Buffer]) -> Stmt:
    """One head: clear its sums, add up block by block, and write."""
    plan, found = whole.plan, whole.plan.found

    def block(b: Expr) -> Stmt:
        nests = (whole, last) if last is not None else (whole,)
        for nest in nests:
            nest.start = b * plan.kb
        whole_keys = imm(plan.kb) if found.keys % plan.kb == 0 else None
        count = (
            whole_keys if whole_keys is not None else T.min(found.keys - whole.start, imm(plan.kb))
        )
        for nest in nests:
            nest.count = count

        def tile(t: Expr) -> Stmt:
            def body(nest: Nest) -> Stmt:
                nest.first = t * plan.lanes
                unit = _tile(nest)
                if not found.causal or plan.blocks == 1:
                    return unit
                return when(nest.first + nest.rows > nest.start, unit)

            if last is None:
                return body(whole)
            if plan.tiles == 1:
                return body(last)
            return when(t < plan.tiles - 1, body(whole), body(last))

        return seq(
            [
                _copied_keys(whole),
                _clear(whole, whole.into_keys, plan.kb * plan.queries.wide, plan.queries),
                _clear(whole, whole.into_values, plan.kb * plan.grads.wide, plan.grads),
                loop(plan.tiles, tile, name="tile"),
                _written(whole, outputs, 1, whole.into_keys, plan.queries, count, whole.start),
                _written(whole, outputs, 2, whole.into_values, plan.grads, count, whole.start),
            ]
        )

    sums = whole.into_queries
    return seq(
        [
            _clear(whole, sums, plan.tiles * plan.lanes * plan.keys.wide, plan.keys),
            loop(plan.blocks, block, name="b"),
            _written(whole, outputs, 0, sums, plan.keys, imm(found.queries), imm(0)),
        ]
    )


def _clear(nest: Nest, sums: Part, size: int, columns: Columns) -> Stmt:
    zero, column, base = T.const(0, "float32"), columns.column, sums.of(nest.task)

    def vector(o: Expr) -> Stmt:
        at = base + o * column
        return loop(column, lambda v: store(sums.buffer, at + v, zero), VECTORIZED, "v")

    return loop(size // column, vector, name="o")


def _copied_keys(nest: Nest) -> Stmt:
    """The block's keys and values, each in one piece: rows far apart compete for few sets."""
    plan, found, nodes = nest.plan, nest.plan.found, nest.spec.nodes
    copies = [
        (nest.keys, nodes[found.scores].inputs[1], plan.depth),
        (nest.values, nodes[found.along].inputs[1], plan.width),
    ]
    lines = _slots(
        nest, nest.lines, nodes[found.into_queries].inputs[1], plan.keys,
        (plan.kb, nest.start, nest.count),
    )  # fmt: skip
    return seq([*(_rows(nest, *copy) for copy in copies), lines])


def _rows(nest: Nest, copy: Part, source: int, width: int) -> Stmt:
    """Rows of the block's keys, of a node whose last axis they are."""
    lanes = nest.vl if width >= nest.vl else 1

    def vector(key: Expr, j: Expr) -> Stmt:
        first = T.min(j * lanes, imm(width - lanes)) if width % lanes else j * lanes

        def lane(v: Expr) -> Stmt:
            at = copy.of(nest.task) + key * width + first + v

            def value(d: Expr) -> Expr:
                return nest.read(source, (d, nest.start + key))

            return nest.reader.scope(
                lambda: [store(copy.buffer, at, nest.operand(value, first + v))]
            )

        return loop(lanes, lane, VECTORIZED, "v")

    def row(key: Expr) -> Stmt:
        return loop(-(-width // lanes), lambda j: vector(key, j), name="j")

    return counted(nest.count, row, "key")


def _slots(
    nest: Nest, copy: Part, source: int, columns: Columns, rows: tuple[int, Expr, Expr]
) -> Stmt:
    """Rows of a node in panels of columns; ``rows``: how many there may be, the first and how many
    there are."""
    most, first, count = rows

    def row(i: Expr) -> Stmt:
        def panel(slot: Expr, many: int) -> Stmt:
            def vector(j: Expr) -> Stmt:
                def lane(v: Expr) -> Stmt:
                    at = nest.slot_at(copy, columns, nest.steps(most), i, (slot, many), j) + v

                    def value(row: Expr) -> Expr:
                        return nest.read(source, (first + row, nest.column(columns, slot + j) + v))

                    return nest.reader.scope(
                        lambda: [store(copy.buffer, at, nest.operand(value, i, count))]
                    )

                return loop(columns.column, lane, VECTORIZED, "v")

            return loop(many, vector, UNROLLED, "j")

        return in_blocks(columns.slots, nest.nc, panel)

    return counted(nest.steps(count), row, "row")


def _tile(nest: Nest) -> Stmt:
    """One tile of queries and the block's keys."""
    plan, found, nodes = nest.plan, nest.plan.found, nest.spec.nodes
    queries, grads = nodes[found.scores].inputs[0], nodes[found.along].inputs[0]
    rows = plan.lanes, nest.first, imm(nest.rows)
    return seq(
        [
            *(stack(b) for b in nest.spread.values()),
            *(_row(nest, n) for n in found.spread),
            _turn(nest, nest.turned_queries, queries, plan.depth),
            _turn(nest, nest.turned_grads, grads, plan.width),
            _slots(nest, nest.queries, nodes[found.into_keys].inputs[1], plan.queries, rows),
            _slots(nest, nest.grads, nodes[found.into_values].inputs[1], plan.grads, rows),
            weights(nest),
            gradients(nest),
        ]
    )


def _row(nest: Nest, node: int) -> Stmt:
    """A number of each query, for its broadcasts."""
    source, spread = nest.spec.nodes[node].inputs[0], nest.spread[node]

    def lane(v: Expr) -> Stmt:
        index = (*nest.full(imm(0), v)[:-1], imm(0))
        return nest.reader.scope(lambda: [store(spread, v, nest.reader.at(source, index))])

    return loop(nest.lanes, lane, name="lane")


def _turn(nest: Nest, copy: Part, source: int, depth: int) -> Stmt:
    """Rows of the tile's queries with queries for neighbours."""
    vl, nv = nest.vl, nest.nv

    def place(d: Expr, vector: Expr, v: Expr) -> tuple[Buffer, Expr]:
        panel, j = T.floordiv(vector, imm(nv)), T.floormod(vector, imm(nv))
        return copy.buffer, nest.turned_at(copy, depth, d, panel, j * vl + v)

    def taken(lane: Expr, step: Expr) -> Expr:
        return nest.operand(lambda d: nest.read(source, (nest.query_at(lane), d)), step)

    if depth < vl or not turns(vl):

        def element(j: Expr, v: Expr, d: Expr) -> Stmt:
            made = partial(taken, j * vl + v, d)
            return nest.reader.scope(lambda: [store(*place(d, j, v), made())])

        def vector(j: Expr) -> Stmt:
            return loop(vl, lambda v: loop(depth, lambda d: element(j, v, d), name="d"), name="v")

        return loop(nest.vectors, vector, name="j")

    def square(j: Expr, block: Expr) -> Stmt:
        first = T.min(block * vl, imm(depth - vl)) if depth % vl else block * vl
        return in_square(
            nest,
            WORD if nest.pairs else "float32",
            lambda i, v: taken(j * vl + i, first + v),
            lambda i, v: place(first + i, j, v),
        )

    blocks = -(-depth // vl)
    return loop(nest.vectors, lambda j: loop(blocks, lambda b: square(j, b), name="b"), name="j")


def _written(
    nest: Nest,
    outputs: list[Buffer],
    which: int,
    sums: Part,
    columns: Columns,
    count: Expr,
    first: Expr,
) -> Stmt:
    """``count`` rows of sums, which are rows of the result from ``first`` on."""
    spec, product = nest.spec, nest.plan.found.outputs[which]
    path = output_path(spec, product, which)
    shape, batch = spec.nodes[path[-1]].shape, spec.nodes[product].shape[:-2]

    def vector(row: Expr, j: Expr) -> Stmt:
        def lane(v: Expr) -> Stmt:
            place = (first + row, nest.column(columns, j) + v)
            index: Index = along(spec, path, (*unlinear(nest.group, batch), *place))
            at = sums.of(nest.task) + row * columns.wide + j * columns.column + v
            nest.reader.overrides[product] = lambda _: sums.buffer[at]
            return nest.reader.scope(
                lambda: [
                    store(outputs[which], linear(index, shape), nest.reader.at(path[-1], index))
                ]
            )

        return loop(columns.column, lane, VECTORIZED, "v")

    def row(i: Expr) -> Stmt:
        return loop(columns.slots, lambda j: vector(i, j), name="j")

    return counted(count, row, "row")
