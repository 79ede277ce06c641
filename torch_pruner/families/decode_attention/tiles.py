"""The two register tiles of a block of keys: scores, and sums of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.lane_sums import sums_across
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    Stmt,
    T,
    buffer,
    loop,
    prefetch,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import (
    Index,
    Reader,
    imm,
    linear,
    reshape_index,
    unlinear,
    view_index,
)
from torch_pruner.codegen.tir.values import store
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.decode_attention.form import DecodeDecisions, DecodePlan, FewQueries
    from torch_pruner.graph.attention import Attention
    from torch_pruner.graph.ir import Graph

_LINE = 64  # bytes
_CHUNKS = 8  # vectors of a key that are summed without a loop


@dataclass(slots=True)
class Nest:
    """What the parts of one emission share; the expressions are those of the open unit."""

    spec: Graph
    few: FewQueries
    plan: DecodePlan
    chosen: DecodeDecisions[int]
    reader: Reader
    dtype: str
    query: Buffer  # [task][row][depth]
    scores: Buffer  # [task][row][key of the block]
    scale: Buffer  # [task][row]: what sums so far are multiplied by
    sums: Buffer  # [unit][row][column of a slot]
    top: Buffer  # [unit][row]
    total: Buffer  # [unit][row][lane]
    out: Buffer
    task: Expr
    unit: Expr
    group: Expr

    @property
    def att(self) -> Attention:
        return self.few.att

    @property
    def vl(self) -> int:
        return self.chosen.vl

    def head(self, row: Expr) -> tuple[Expr, Expr]:
        """The group of the graph (batch and head) and the query of a row."""
        head, query = unlinear(row, (self.few.together, self.att.queries))
        return self.group * self.few.together + head, query

    def full(self, row: Expr, key: Expr) -> Index:
        group, query = self.head(row)
        return (*unlinear(group, self.att.batch), query, key)

    def query_at(self, row: Expr) -> Expr:
        return (self.task * self.few.rows + row) * (self.plan.chunks * self.vl)

    def score_at(self, row: Expr) -> Expr:
        return (self.task * self.few.rows + row) * self.chosen.kb

    def row_at(self, row: Expr) -> Expr:
        return self.unit * self.few.rows + row

    def first_column(self, slot: Expr) -> Expr:
        """The first column of a slot; a last one that is not full begins earlier."""
        width, first = self.att.width, slot * self.vl
        return T.min(first, imm(width - self.vl)) if width % self.vl else first

    def shared(self, node: int, row: Expr, column: Expr) -> Index:
        """An index of keys or values, of the first head of those that share them."""
        batch = self.spec.nodes[node].shape[:-2]
        return (*unlinear(self.group * self.few.together, batch), row, column)


def query_copied(nest: Nest) -> Stmt:
    """The rows of the unit, in one piece and as wide as sums."""
    node, depth, vl = nest.spec.nodes[nest.att.scores].inputs[0], nest.att.depth, nest.vl
    batch = nest.spec.nodes[node].shape[:-2]

    def vector(row: Expr, c: Expr) -> Stmt:
        group, query = nest.head(row)
        first = _first(c, vl, depth)

        def lane(v: Expr) -> Stmt:
            index = (*unlinear(group, batch), query, first + v)
            value = nest.reader.at(node, index).astype(nest.dtype)
            return store(nest.query, nest.query_at(row) + first + v, value)

        return loop(vl, lambda v: nest.reader.scope(lambda: [lane(v)]), VECTORIZED, "v")

    return loop(
        nest.few.rows, lambda r: loop(nest.plan.chunks, lambda c: vector(r, c), name="c"), name="r"
    )


def scores_of(nest: Nest, start: Expr, count: int) -> Stmt:
    """Products of all rows with ``count`` keys from a position on, stored to ``scores``.

    Behind the last key the last one is repeated, up to a whole tile.
    """
    together = nest.vl // nest.chosen.nq
    rows = -(-nest.few.rows // nest.chosen.nq)
    each = -(-together // rows)  # values that are fetched with one tile of scores

    def tile(t: Expr) -> Stmt:
        first = t * together

        def row(r: Expr) -> Stmt:
            fetch = None
            if nest.chosen.ahead:
                value = start + first + r * each
                fetch = _values_fetched(nest, value, each)
                if each * rows > together:
                    fetch = when(r * each < imm(together), fetch)
            return seq([fetch, _score_tile(nest, start, count, first, r)])

        return loop(rows, row, name="r")

    return loop(-(-count // together), tile, name="t")


def _score_tile(nest: Nest, start: Expr, count: int, first: Expr, r: Expr) -> Stmt:
    """``nq`` rows by as many keys as make a vector of scores, summed along the depth."""
    att, vl, nq = nest.att, nest.vl, nest.chosen.nq
    together, node = vl // nq, nest.spec.nodes[nest.att.scores].inputs[1]
    acc = buffer(vl * vl, nest.dtype, "acc", scope="local")
    zero = T.const(0, nest.dtype)

    def row_of(i: Expr) -> Expr:
        row = r * nq + i
        return T.min(row, imm(nest.few.rows - 1)) if nest.few.rows % nq else row

    def key_of(j: Expr) -> Expr:
        key = first + j
        return start + (T.min(key, imm(count - 1)) if count % together else key)

    def each(j: Expr, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """``body(i, v)`` for the rows, so that a vector of a key is loaded once."""
        return loop(nq, lambda i: loop(vl, lambda v: body(i, v), VECTORIZED, "v"), UNROLLED, "i")

    def keys(body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
        return loop(together, lambda j: each(j, lambda i, v: body(i, j, v)), UNROLLED, "j")

    def place(i: Expr, j: Expr, v: Expr) -> Expr:
        return (i * together + j) * vl + v

    def chunk(c: Expr, j: Expr) -> Stmt:
        at = _first(c, vl, att.depth)

        def update(i: Expr, v: Expr) -> Stmt:
            index = nest.shared(node, at + v, key_of(j))
            key = nest.reader.at(node, index).astype(nest.dtype)
            product = key * nest.query[nest.query_at(row_of(i)) + at + v]
            if att.depth % vl:  # what the chunk before had already
                product = T.Select(at + v >= c * vl, product, zero)
            to = place(i, j, v)
            return store(acc, to, acc[to] + product)

        return each(j, update)

    def part(o: Expr) -> Stmt:
        """Keys one after the other, as they lie in memory, which the processor reads ahead."""

        def key(j: Expr) -> Stmt:
            return loop(some, lambda c: chunk(o * some + c, j), UNROLLED, "c")

        return loop(together, key, UNROLLED, "j")

    some = max(d for d in range(1, _CHUNKS + 1) if nest.plan.chunks % d == 0)
    across, sums = sums_across(acc, vl)

    def kept(i: Expr) -> Stmt:
        to = nest.score_at(row_of(i)) + first
        return loop(
            together,
            lambda v: store(nest.scores, to + v, acc[sums + i * together + v]),
            VECTORIZED,
            "v",
        )

    return seq(
        [
            stack(acc),
            keys(lambda i, j, v: store(acc, place(i, j, v), zero)),
            loop(nest.plan.chunks // some, part, name="c"),
            *across,
            loop(nq, kept, UNROLLED, "i"),
        ]
    )


def products_of(nest: Nest, start: Expr, count: int) -> Stmt:
    """Powers times values, added to the sums after these are scaled."""
    row_tiles = -(-nest.few.rows // nest.chosen.nr)
    tiles = row_tiles * -(-nest.plan.slots // nest.chosen.nc)

    def columns(c: Expr, slot: Expr, many: int) -> Stmt:
        def rows(r: Expr, row: Expr, some: int) -> Stmt:
            turn = (c * row_tiles + r, tiles)
            return _product_tile(nest, start, count, (row, some), (slot, many), turn)

        return _blocks(nest.few.rows, nest.chosen.nr, rows)

    return _blocks(nest.plan.slots, nest.chosen.nc, columns)


def _blocks(total: int, size: int, body: Callable[[Expr, Expr, int], Stmt]) -> Stmt:
    """``body(number, first, many)`` for blocks of ``size`` and the rest."""
    whole, rest = divmod(total, size)
    parts = [loop(whole, lambda c: body(c, c * size, size), name="b")] if whole else []
    return seq([*parts, body(imm(whole), imm(whole * size), rest) if rest else None])


def _product_tile(
    nest: Nest,
    start: Expr,
    count: int,
    rows: tuple[Expr, int],
    slots: tuple[Expr, int],
    turn: tuple[Expr, int],
) -> Stmt:
    """Some rows by some vectors of columns, over ``count`` keys: one turn of so many."""
    (row, many_rows), (slot, many), vl = rows, slots, nest.vl
    acc = buffer(many_rows * many * vl, nest.dtype, "acc", scope="local")
    node = _values(nest)

    def each(body: Callable[[Expr, Expr, Expr, Expr], Stmt]) -> Stmt:
        """``body(i, j, v, at)``: row, slot and lane, and the place in the tile."""

        def vectors(j: Expr, i: Expr) -> Stmt:
            first = (i * many + j) * vl
            return loop(vl, lambda v: body(i, j, v, first + v), VECTORIZED, "v")

        return loop(
            many, lambda j: loop(many_rows, lambda i: vectors(j, i), UNROLLED, "i"), UNROLLED, "j"
        )

    def sums_at(i: Expr, j: Expr, v: Expr) -> Expr:
        return nest.row_at(row + i) * (nest.plan.slots * vl) + (slot + j) * vl + v

    def begin(i: Expr, j: Expr, v: Expr, at: Expr) -> Stmt:
        scale = nest.scale[nest.task * nest.few.rows + row + i]
        return store(acc, at, nest.sums[sums_at(i, j, v)] * scale)

    def step(k: Expr) -> Stmt:
        def update(i: Expr, j: Expr, v: Expr, at: Expr) -> Stmt:
            index = nest.shared(node, start + k, nest.first_column(slot + j) + v)
            value = nest.reader.at(node, index).astype(nest.dtype)
            power = nest.scores[nest.score_at(row + i) + k]
            return store(acc, at, acc[at] + power * value)

        fetch = _next_key(nest, start + k, turn) if nest.chosen.ahead > 1 else None
        return seq([fetch, each(update)])

    return seq(
        [
            stack(acc),
            each(begin),
            loop(count, step, name="k"),
            each(lambda i, j, v, at: store(nest.sums, sums_at(i, j, v), acc[at])),
        ]
    )


def _values(nest: Nest) -> int:
    return nest.spec.nodes[nest.att.out].inputs[1]


def _first(c: Expr, vl: int, depth: int) -> Expr:
    """Where a chunk of the depth begins; a last one that is not full begins earlier."""
    return T.min(c * vl, imm(depth - vl)) if depth % vl else c * vl


def _next_key(nest: Nest, key: Expr, turn: tuple[Expr, int]) -> Stmt:
    """Fetches a key of the unit's next block, of whose lines each turn takes some."""
    node = nest.spec.nodes[nest.att.scores].inputs[1]
    far = key + nest.chosen.kb * nest.chosen.shares
    (now, turns), each = turn, _line(nest, node)
    lines = -(-nest.att.depth // each)
    some = -(-lines // turns)
    stmt = seq([_fetched(nest, node, (now * some + j) * each, far) for j in range(some)])
    return when(now * some < imm(lines), stmt) if some * turns > lines else stmt


def _values_fetched(nest: Nest, first: Expr, many: int) -> Stmt:
    """Fetches ``many`` values, which may lie behind the last one."""
    node = _values(nest)
    each = _line(nest, node)
    lines = range(0, nest.att.width, each)
    return loop(
        many,
        lambda k: seq([_fetched(nest, node, first + k, imm(at)) for at in lines]),
        UNROLLED,
        "k",
    )


def _line(nest: Nest, node: int) -> int:
    return _LINE // ITEMSIZE[nest.spec.nodes[node].dtype]


def _fetched(nest: Nest, node: int, row: Expr, column: Expr) -> Stmt:
    source, at = _located(nest.spec, node, nest.shared(node, row, column))
    return prefetch(nest.reader.buffers[source], at)


def _located(spec: Graph, at: int, index: Index) -> tuple[int, Expr]:
    """The input that a view of it reads, and the position of an element there."""
    node = spec.nodes[at]
    while node.op != "input":
        below = node.inputs[0]
        source = spec.nodes[below]
        if node.op == "reshape":
            index = reshape_index(index, node.shape, source.shape)
        else:
            index = view_index(node.op, dict(node.attrs), index, source.shape)
        at, node = below, source
    return at, linear(index, node.shape)
