"""What one tile of attention works on: its buffers, and the copies that are made for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.pair_words import WORD, word
from torch_pruner.codegen.parts.transposed import in_square, turns
from torch_pruner.codegen.tir.builders import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    index_var,
    loop,
    seq,
)
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.values import load, store

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.graph.attention import Attention, AttentionPlan
    from torch_pruner.graph.extents import Bounds
    from torch_pruner.graph.ir import Graph


@dataclass(slots=True)
class Nest:
    """Everything the parts of one emission share; the expressions are those of the open unit."""

    spec: Graph
    att: Attention
    plan: AttentionPlan
    reader: Reader
    vl: int
    nv: int
    tm: int  # keys of a tile of scores
    most: int  # the same, of the tile that has most
    tr: int
    nc: int
    turned: bool  # lanes hold queries in the second product, too
    kb: int
    dtype: str
    scores: Buffer  # [task][key][lane]
    query: Buffer  # [task][depth][lane]
    sums: Buffer  # [task][lane][column of a slot]; turned: [task][column][lane]
    values: Buffer | None  # [task][key][column of a slot], where they are not read in place
    keys: Buffer | None  # [task][key][depth], the same
    pairs: bool  # queries, keys and values are words of two bfloat16, and powers are, too
    masks: dict[int, Buffer]  # [task][key][lane]
    packed: dict[int, tuple[Buffer, tuple[int, ...]]]  # constant masks, and extents of groups
    hiding: int | None  # of the masks: where it is -inf no finite score counts
    seen: Buffer | None  # [task]: keys up to the last that it does not hide
    top: Buffer
    total: Buffer
    spread: dict[int, Buffer]
    out: Buffer
    row: Buffer | None  # of a number of each query, where others read one
    task: Expr
    group: Expr
    first: Expr  # query of lane 0
    end: Expr  # keys that some query of the tile sees
    rows: int  # queries of a tile, the others being repetitions of the last
    unwritten: Bounds = frozenset()  # of the result: what nobody needs of it
    counted: Expr | None = None  # keys that count, where they are fewer than there are
    open: int | None = None  # scores, where only those behind the keys that count are masked

    @property
    def bounded(self) -> bool:
        """Whether a tile may end before the last key."""
        return self.att.causal or self.hiding is not None or self.counted is not None

    @property
    def lanes(self) -> int:
        return self.vl * self.nv

    @property
    def steps(self) -> int:
        """Of the sum that is a score."""
        return self.att.depth // 2 if self.pairs else self.att.depth

    def query_at(self, lane: Expr) -> Expr:
        at = self.first + lane
        last = self.att.queries - 1
        return T.min(at, imm(last)) if self.rows < self.lanes else at

    def score_at(self, key: Expr, lane: Expr) -> Expr:
        return self.of_task(self.att.keys) + key * self.lanes + lane

    def query_lane(self, d: Expr, lane: Expr) -> Expr:
        """The place of an element of the copied queries."""
        return self.of_task(self.steps) + d * self.lanes + lane

    def of_task(self, rows: int) -> Expr:
        """Where the task's part of a buffer of ``rows`` times the lanes of the widest tile is."""
        return self.task * (rows * self.plan.lanes)

    def full(self, key: Expr, lane: Expr) -> Index:
        return (*unlinear(self.group, self.att.batch), self.query_at(lane), key)


def over_lanes(nest: Nest, body: Callable[[Expr], Stmt]) -> Stmt:
    """All lanes of a tile, a vector at a time."""

    def vector(j: Expr) -> Stmt:
        return loop(nest.vl, lambda v: body(j * nest.vl + v), VECTORIZED, "v")

    return loop(nest.nv, vector, UNROLLED, "j")


def counted(extent: Expr, body: Callable[[Expr], Stmt], name: str) -> Stmt:
    """A loop whose count is known at run time only."""
    var = index_var(name)
    return S.For(var, imm(0), extent, SERIAL, body(var))


def over_keys(nest: Nest, body: Callable[[Expr], Stmt]) -> Stmt:
    if nest.bounded:
        return counted(nest.end, body, "key")
    return loop(nest.att.keys, body, name="key")


def first_column(nest: Nest, slot: Expr) -> Expr:
    """The first column of a slot; the last slot overlaps the one before where widths say so."""
    first, last = slot * nest.plan.column, nest.att.width - nest.plan.column
    return T.min(first, imm(last)) if nest.att.width % nest.plan.column else first


def pack_queries(nest: Nest) -> Stmt:
    """The tile's queries with lanes for neighbours: squares of vectors turned in registers."""
    depth, vl = nest.steps, nest.vl
    if depth < vl or not turns(vl):
        return _pack_queries_singly(nest)

    def square(j: Expr, block: Expr) -> Stmt:
        first = T.min(block * vl, imm(depth - vl)) if depth % vl else block * vl

        def taken(i: Expr, v: Expr) -> Expr:
            return _query_of(nest, j * vl + i, first + v)

        def left(i: Expr, v: Expr) -> tuple[Buffer, Expr]:
            return nest.query, nest.query_lane(first + i, j * vl + v)

        return in_square(nest, WORD if nest.pairs else nest.dtype, taken, left)

    blocks = -(-depth // vl)
    return loop(nest.nv, lambda j: loop(blocks, lambda b: square(j, b), name="block"), name="j")


def _query_of(nest: Nest, lane: Expr, step: Expr) -> Expr:
    """What a step of a score multiplies, of a lane's query."""
    source = nest.spec.nodes[nest.att.scores].inputs[0]
    batch = nest.spec.nodes[source].shape[:-2]

    def at(d: Expr) -> Expr:
        index = (*unlinear(nest.group, batch), nest.query_at(lane), d)
        return nest.reader.at(source, index).astype(nest.dtype)

    return word(at(step * 2), at(step * 2 + 1)) if nest.pairs else at(step)


def _pack_queries_singly(nest: Nest) -> Stmt:
    def element(lane: Expr, d: Expr) -> Stmt:
        at = nest.query_lane(d, lane)
        return nest.reader.scope(lambda: [store(nest.query, at, _query_of(nest, lane, d))])

    return loop(
        nest.lanes, lambda v: loop(nest.steps, lambda d: element(v, d), name="d"), name="lane"
    )


def pack_values(nest: Nest, copy: Buffer, *, every: bool) -> Stmt:
    """Values of a head in one piece: rows far apart compete for few sets of the cache.

    ``every``: for later tiles of the head, too, which may see more keys than the open one.
    """
    plan = nest.plan

    def taken(key: Expr, column: Expr) -> Expr:
        if not nest.pairs:
            return value_of(nest, key, column)
        keys, (first, second) = nest.att.keys, (key * 2, key * 2 + 1)
        if keys % 2 == 0 and nest.counted is None:
            return word(value_of(nest, first, column), value_of(nest, second, column))
        # Behind the last key that counts may lie anything, and 0 times infinity is not 0.
        count = imm(keys) if nest.counted is None else nest.counted
        other = value_of(nest, T.min(second, imm(keys - 1)), column)
        other = T.Select(second < count, other, T.const(0, nest.dtype))
        return word(value_of(nest, first, column), other)

    def vector(key: Expr, first: Expr, many: int, j: Expr) -> Stmt:
        def lane(v: Expr) -> Stmt:
            at = value_at(nest, key, first, many, j) + v
            return nest.reader.scope(
                lambda: [store(copy, at, taken(key, first_column(nest, first + j) + v))]
            )

        return loop(plan.column, lane, VECTORIZED, "v")

    def panel(key: Expr, first: Expr, many: int) -> Stmt:
        return loop(many, lambda j: vector(key, first, many, j), UNROLLED, "j")

    def row(key: Expr) -> Stmt:
        return in_blocks(plan.slots, nest.nc, lambda first, many: panel(key, first, many))

    return _copied_keys(nest, row, every, 2 if nest.pairs else 1)


def in_blocks(slots: int, size: int, body: Callable[[Expr, int], Stmt]) -> Stmt:
    """Column slots in blocks of ``size``, the rest as a smaller block."""
    whole, rest = divmod(slots, size)
    parts = [loop(whole, lambda c: body(c * size, size), name="c")] if whole else []
    return seq([*parts, body(imm(whole * size), rest) if rest else None])


def _copied_keys(nest: Nest, body: Callable[[Expr], Stmt], every: bool, some: int = 1) -> Stmt:
    """``body`` for every key, or for those of the tiles of scores that the open unit makes:
    ``some`` at once."""
    end = nest.counted if every else nest.end
    if end is None or not nest.bounded:
        return loop(-(-nest.att.keys // some), body, name="key")
    last = T.min(end + (nest.most - 1), imm(nest.att.keys))
    return counted(T.floordiv(last + (some - 1), some) if some > 1 else last, body, "key")


def value_at(nest: Nest, key: Expr, first: Expr, many: int, j: Expr) -> Expr:
    """The place of vector ``j`` of the ``many`` from slot ``first`` on: a panel of their own.

    So what a register tile reads of many keys is one piece, which uses all sets of the cache.
    """
    keys, column = nest.att.keys, nest.plan.column
    keys = -(-keys // 2) if nest.pairs else keys  # then ``key`` counts pairs
    panel = (nest.task * nest.plan.slots + first) * (keys * column)
    return panel + (key * many + j) * column


def value_of(nest: Nest, key: Expr, column: Expr) -> Expr:
    """A value where the graph has it."""
    node = nest.spec.nodes[nest.att.out].inputs[1]
    index = (*unlinear(nest.group, nest.spec.nodes[node].shape[:-2]), key, column)
    return nest.reader.at(node, index).astype(nest.dtype)


def pack_keys(nest: Nest, copy: Buffer, *, every: bool) -> Stmt:
    """Keys of a head in one piece, converted to what is multiplied; see ``pack_values``."""
    depth = nest.steps
    lanes = nest.vl if depth >= nest.vl else 1

    def taken(key: Expr, step: Expr) -> Expr:
        if not nest.pairs:
            return key_of(nest, key, step)
        return word(key_of(nest, key, step * 2), key_of(nest, key, step * 2 + 1))

    def vector(key: Expr, j: Expr) -> Stmt:
        first = T.min(j * lanes, imm(depth - lanes)) if depth % lanes else j * lanes

        def lane(v: Expr) -> Stmt:
            at = key_at(nest, key, first + v)
            return nest.reader.scope(lambda: [store(copy, at, taken(key, first + v))])

        return loop(lanes, lane, VECTORIZED, "v")

    count = -(-depth // lanes)
    return _copied_keys(nest, lambda key: loop(count, lambda j: vector(key, j), name="j"), every)


def key_at(nest: Nest, key: Expr, d: Expr) -> Expr:
    return (nest.task * nest.att.keys + key) * nest.steps + d


def key_of(nest: Nest, key: Expr, d: Expr) -> Expr:
    """An element of a key where the graph has it."""
    node = nest.spec.nodes[nest.att.scores].inputs[1]
    index = (*unlinear(nest.group, nest.spec.nodes[node].shape[:-2]), d, key)
    return nest.reader.at(node, index).astype(nest.dtype)


def pack_mask(nest: Nest, node: int) -> Stmt:
    """A mask's tile with lanes for neighbours."""
    source = nest.masks[node]

    def value(lane: Expr, key: Expr) -> Expr:
        nest.reader.overrides.pop(node, None)
        return nest.reader.at(node, nest.full(key, lane))

    if nest.spec.nodes[node].dtype == "float32" and nest.att.keys >= nest.vl and turns(nest.vl):
        return _mask_in_squares(nest, source, value)

    def element(lane: Expr, key: Expr) -> Stmt:
        return nest.reader.scope(
            lambda: [store(source, nest.score_at(key, lane), value(lane, key))]
        )

    return loop(nest.lanes, lambda v: over_keys(nest, lambda key: element(v, key)), name="lane")


def _mask_in_squares(nest: Nest, copy: Buffer, value: Callable[[Expr, Expr], Expr]) -> Stmt:
    keys, vl = nest.att.keys, nest.vl

    def square(j: Expr, block: Expr) -> Stmt:
        first = T.min(block * vl, imm(keys - vl)) if keys % vl else block * vl
        return in_square(
            nest,
            "float32",
            lambda i, v: value(j * vl + i, first + v),
            lambda i, v: (copy, nest.score_at(first + i, j * vl + v)),
        )

    def blocks(j: Expr) -> Stmt:
        if nest.bounded:
            count = T.floordiv(nest.end + (vl - 1), imm(vl))
            return counted(count, lambda block: square(j, block), "block")
        return loop(-(-keys // vl), lambda block: square(j, block), name="block")

    return loop(nest.nv, blocks, name="j")


def of_constant(nest: Nest, node: int, key: Expr, lane: Expr) -> Callable[[Index], Expr]:
    """An element of a constant mask, packed with queries for neighbours."""
    packed, batch = nest.packed[node]
    index = unlinear(nest.group, nest.att.batch)
    at = [i if extent > 1 else imm(0) for i, extent in zip(index, batch, strict=True)]
    block = -(-nest.att.queries // nest.vl) * nest.vl
    row = linear(at, batch) * nest.att.keys + key if batch else key
    return kept(packed, row * block + nest.first + lane)


def kept(copy: Buffer, at: Expr) -> Callable[[Index], Expr]:
    return lambda _: load(copy, at)
