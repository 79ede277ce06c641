"""How many keys a tile of queries visits where a mask in memory hides keys from it.

Behind the last key that the mask does not hide from every query of the tile, a score is -inf and a
power is 0, whatever the finite number it was made of. So the tile ends there, if the numbers that
it would meet behind it (queries, keys, values) are small enough for that: one integer maximum over
their bits tells it, NaN and infinity included.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.attention_tile import (
    Nest,
    counted,
    first_column,
    key_of,
    over_lanes,
    value_of,
)
from torch_pruner.codegen.parts.beyond import counts
from torch_pruner.codegen.tir.builders import (
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
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.codegen.tir.values import load, store, value_dtype
from torch_pruner.graph.attention_masks import masked_values, masks_alone, visited_keys

if TYPE_CHECKING:
    from collections.abc import Callable

_LARGEST = 1e30
_LARGEST_FLOAT16 = 1e4  # a score that is rounded to float16 must not become infinite


def see(nest: Nest) -> Stmt:
    """Note how many keys the tile sees, by the copy of the mask: at least one."""
    assert nest.hiding is not None
    assert nest.seen is not None
    mask, seen, last = (
        nest.masks[nest.hiding],
        nest.seen,
        buffer(nest.lanes, "int32", "last", "local"),
    )
    hidden = T.const(-math.inf, value_dtype(nest.spec.nodes[nest.hiding].dtype))

    def key(k: Expr) -> Stmt:
        def lane(v: Expr) -> Stmt:
            hides = T.EQ(load(mask, nest.score_at(k, v)), hidden)
            return store(last, v, T.Select(hides, last[v], (k + 1).astype("int32")))

        return over_lanes(nest, lane)

    def furthest(v: Expr) -> Stmt:
        return store(seen, nest.task, T.max(seen[nest.task], last[v]))

    return seq(
        [
            stack(last),
            over_lanes(nest, lambda v: store(last, v, T.const(1, "int32"))),
            loop(nest.att.keys, key, name="key"),
            store(seen, nest.task, T.const(1, "int32")),
            loop(nest.lanes, furthest, name="lane"),
        ]
    )


def end(nest: Nest, found: Buffer) -> Stmt:
    """``found[0]``: the keys that the open unit visits, its queries being copied."""
    assert nest.seen is not None
    seen = nest.seen[nest.task].astype(index_dtype())
    every = imm(nest.att.keys)
    narrow = any(nest.spec.nodes[i].dtype == "float16" for i in nest.att.inner)
    bound = T.const(_LARGEST_FLOAT16 if narrow else _LARGEST, "float32")
    tops = [buffer(nest.vl, "int32", f"top{i}", scope="local") for i in range(3)]

    def rest(body: Callable[[Expr], Stmt]) -> Stmt:
        return counted(every - seen, lambda k: body(seen + k), "key")

    def queries(d: Expr) -> Stmt:
        return _vectors(
            nest,
            tops[0],
            nest.nv,
            nest.vl,
            lambda j, v: nest.query[nest.query_lane(d, j * nest.vl + v)],
        )

    query, key, value = (_highest(t, nest.vl) for t in tops)
    small = T.all(query * key * T.const(nest.att.depth, "float32") < bound, value < bound)
    return seq(
        [
            store(found, imm(0), every),
            when(
                seen < every,
                seq(
                    [
                        *(stack(t) for t in tops),
                        *(_clear(t, nest.vl) for t in tops),
                        loop(nest.att.depth, queries, name="d"),
                        rest(lambda k: _key(nest, tops[1], k)),
                        rest(lambda k: _value(nest, tops[2], k)),
                        when(small, store(found, imm(0), seen)),
                    ]
                ),
            ),
        ]
    )


def _key(nest: Nest, top: Buffer, key: Expr) -> Stmt:
    depth = nest.att.depth
    lanes = nest.vl if depth >= nest.vl else 1

    def read(j: Expr, v: Expr) -> Expr:
        d = (T.min(j * lanes, imm(depth - lanes)) if depth % lanes else j * lanes) + v
        return key_of(nest, key, d)

    return _vectors(nest, top, -(-depth // lanes), lanes, read)


def _value(nest: Nest, top: Buffer, key: Expr) -> Stmt:
    def read(j: Expr, v: Expr) -> Expr:
        return value_of(nest, key, first_column(nest, j) + v)

    return _vectors(nest, top, nest.plan.slots, nest.plan.column, read)


def _vectors(
    nest: Nest, top: Buffer, count: int, lanes: int, read: Callable[[Expr, Expr], Expr]
) -> Stmt:
    """The magnitudes of ``count`` vectors into ``top``, as the integers that their bits are."""

    def vector(j: Expr) -> Stmt:
        def lane(v: Expr) -> Stmt:
            def taken() -> list[Stmt]:
                raw = T.reinterpret("int32", read(j, v))
                magnitude = T.bitwise_and(raw, T.const(0x7FFFFFFF, "int32"))
                return [store(top, v, T.max(top[v], magnitude))]

            return nest.reader.scope(taken)

        return loop(lanes, lane, VECTORIZED, "v")

    return loop(count, vector, name="j")


def _clear(top: Buffer, lanes: int) -> Stmt:
    return loop(lanes, lambda v: store(top, v, T.const(0, "int32")), VECTORIZED, "v")


def _highest(top: Buffer, lanes: int) -> Expr:
    found = top[imm(0)]
    for v in range(1, lanes):
        found = T.max(found, top[imm(v)])
    return T.reinterpret("float32", found)


def leave_out(nest: Nest) -> None:
    """What lies behind the keys that count is not visited, and needs no mask but in the last tile
    of scores."""
    spec, att, reader = nest.spec, nest.att, nest.reader
    number = visited_keys(spec, att, nest.unwritten)
    if number is None:
        return
    nest.counted = T.min(counts(reader, number), imm(att.keys))
    nest.open = spec.nodes[att.masked].inputs[1] if masks_alone(spec, att, number) else None
    mask = masked_values(spec, att)
    if mask is not None and mask[1] == number:  # none of those behind is multiplied
        whole = spec.nodes[mask[0]].inputs[1]
        reader.overrides[mask[0]] = lambda index: reader.at(whole, index)
