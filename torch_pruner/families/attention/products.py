"""Powers of the scores of a tile of queries times values: what of the two lies in lanes.

Columns of values in lanes, a row of sums for each query; or, of heads that are narrower than a
vector, queries, a row of sums for each column. Then powers need not be read as scalars, and are
made on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.attention_tile import (
    Nest,
    counted,
    first_column,
    in_blocks,
    kept,
    over_keys,
    over_lanes,
    value_at,
    value_of,
)
from torch_pruner.codegen.parts.pair_words import in_pairs
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
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.codegen.tir.values import load, store
from torch_pruner.families.attention.pairs import added_to_sums, powers_in_pairs

if TYPE_CHECKING:
    from collections.abc import Callable


def power(nest: Nest, key: Expr, v: Expr, to: Buffer | None = None) -> Stmt:
    """A score's power, in the score's place or in a lane of ``to``, and added to the row's sum."""
    att, reader, at = nest.att, nest.reader, nest.score_at(key, v)
    target, place = (nest.scores, at) if to is None else (to, v)

    def emitted() -> list[Stmt]:
        reader.overrides[att.masked] = lambda _: nest.scores[at]
        for node in att.spread:
            reader.overrides[node] = kept(nest.spread[node], v)
        value = reader.at(att.powers, nest.full(key, v))
        total = nest.total[v] + target[place]
        return [store(target, place, value), store(nest.total, v, total)]

    stmt = reader.scope(emitted)
    del reader.overrides[att.masked]
    return stmt


def columns_of_queries(nest: Nest) -> list[Stmt]:
    """Lanes hold queries: some columns with every pass over the keys, the first of which makes the
    powers."""
    width, first = nest.att.width, min(nest.nc, nest.att.width)

    def later(block: Expr, many: int) -> Stmt:
        return _column_tile(nest, block + first, many, makes=False)

    parts = [_column_tile(nest, imm(0), first, makes=True)]
    return [*parts, in_blocks(width - first, nest.nc, later)] if first < width else parts


def _column_tile(nest: Nest, column: Expr, many: int, *, makes: bool) -> Stmt:
    """One register tile: ``many`` columns by the tile's vectors of queries, over all keys."""
    lanes, width = nest.lanes, nest.att.width
    acc = buffer(many * lanes, nest.dtype, "acc", scope="local")
    powers = buffer(lanes, nest.dtype, "power", scope="local")
    stays = makes and many < width  # for later columns
    zero = T.const(0, nest.dtype)

    def each(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        return loop(many, lambda c: over_lanes(nest, lambda v: body(c, v)), UNROLLED, "c")

    def step(key: Expr) -> Stmt:
        def taken(v: Expr) -> Stmt:
            return store(powers, v, nest.scores[nest.score_at(key, v)])

        def left(v: Expr) -> Stmt:
            return store(nest.scores, nest.score_at(key, v), powers[v])

        def update(c: Expr, v: Expr) -> Stmt:
            if nest.values is None:
                value = value_of(nest, key, column + c)
            else:
                value = load(nest.values, value_at(nest, key, column, many, c))
            return store(acc, c * lanes + v, acc[c * lanes + v] + powers[v] * value)

        made = over_lanes(nest, lambda v: power(nest, key, v, powers) if makes else taken(v))
        return seq([made, over_lanes(nest, left) if stays else None, each(update)])

    def sums_at(c: Expr, v: Expr) -> Expr:
        return nest.of_task(width) + (column + c) * lanes + v

    return seq(
        [
            stack(acc),
            stack(powers),
            each(lambda c, v: store(acc, c * lanes + v, zero)),
            over_keys(nest, step),
            each(lambda c, v: store(nest.sums, sums_at(c, v), acc[c * lanes + v])),
        ]
    )


def rows_of_queries(nest: Nest) -> list[Stmt]:
    """Lanes hold columns: powers of all keys, then their products with the values, a block of keys
    at a time so that values stay cached."""
    att, plan = nest.att, nest.plan
    width = plan.slots * plan.column
    zero = T.const(0, nest.dtype)
    base = nest.of_task(width)

    def clear(j: Expr) -> Stmt:
        at = base + j * plan.column
        return loop(plan.column, lambda v: store(nest.sums, at + v, zero), VECTORIZED, "v")

    def block(o: Expr) -> Stmt:
        start = o * nest.kb
        limit = nest.end if nest.bounded else imm(att.keys)
        static = not nest.bounded and att.keys % nest.kb == 0
        count = nest.kb if static else T.min(limit - start, imm(nest.kb))
        if nest.pairs:
            start, count = T.floordiv(start, 2), in_pairs(count)

        def columns(slot: Expr, many: int) -> Stmt:
            def rows(row: Expr, some: int) -> Stmt:
                return _product_tile(nest, start, count, (row, some), (slot, many))

            return in_blocks(nest.rows, nest.tr, rows)

        return in_blocks(plan.slots, nest.nc, columns)

    if nest.pairs:
        powers = powers_in_pairs(nest, power)
    else:
        powers = over_keys(nest, lambda key: over_lanes(nest, lambda v: power(nest, key, v)))
    if nest.kb >= att.keys:  # the one block starts its sums
        return [powers, block(imm(0))]
    if nest.bounded:
        blocks = counted(T.floordiv(nest.end + (nest.kb - 1), nest.kb), block, "block")
    else:
        blocks = loop(-(-att.keys // nest.kb), block, name="block")
    return [powers, loop(nest.rows * plan.slots, clear, name="o"), blocks]


def _product_tile(
    nest: Nest,
    start: Expr,
    count: int | Expr,
    rows: tuple[Expr, int],
    columns: tuple[Expr, int],
) -> Stmt:
    """One register tile over a block of keys. ``rows``: the first query and how many;
    ``columns``: the first slot and how many."""
    plan, values = nest.plan, nest.values
    (row, some), (slot, many) = rows, columns
    column, width = plan.column, plan.slots * plan.column
    acc = buffer(some * many * column, nest.dtype, "acc", scope="local")
    begun = nest.kb < nest.att.keys

    def each(body: Callable[[Expr, Expr, Expr, Expr], Stmt]) -> Stmt:
        """``body(i, j, v, at)``: row, slot and lane, and the place in the tile."""

        def vector(i: Expr, j: Expr) -> Stmt:
            first = (i * many + j) * column
            return loop(column, lambda v: body(i, j, v, first + v), VECTORIZED, "v")

        return loop(
            some, lambda i: loop(many, lambda j: vector(i, j), UNROLLED, "j"), UNROLLED, "i"
        )

    def sums_at(i: Expr, j: Expr, v: Expr) -> Expr:
        return nest.of_task(width) + (row + i) * width + (slot + j) * column + v

    def before(i: Expr, j: Expr, v: Expr) -> Expr:
        return nest.sums[sums_at(i, j, v)] if begun else T.const(0, nest.dtype)

    def step(k: Expr) -> Stmt:
        if nest.pairs:
            return added_to_sums(nest, acc, start + k, rows, columns)

        def update(i: Expr, j: Expr, v: Expr, at: Expr) -> Stmt:
            if values is None:
                value = value_of(nest, start + k, first_column(nest, slot + j) + v)
            else:
                value = load(values, value_at(nest, start + k, slot, many, j) + v)
            factor = nest.scores[nest.score_at(start + k, row + i)]
            return store(acc, at, acc[at] + factor * value)

        return each(update)

    steps = loop(count, step, name="k") if isinstance(count, int) else counted(count, step, "k")
    return seq(
        [
            stack(acc),
            each(lambda i, j, v, at: store(acc, at, before(i, j, v))),
            steps,
            each(lambda i, j, v, at: store(nest.sums, sums_at(i, j, v), acc[at])),
        ]
    )
