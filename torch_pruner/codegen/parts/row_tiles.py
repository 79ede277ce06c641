"""One register tile of a contraction: sums over a block of the reduction, then the epilogue.

The tile is ``tm`` rows by some vectors of a column panel, accumulated in local scope and written
once. Which rows it has and how it passes over the reduction is a ``TileTraversal``; the sketches
that share tiles differ in that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import beyond, unless
from torch_pruner.codegen.parts.operands import a_at, b_at, row_at
from torch_pruner.codegen.parts.output import along, anchor_index, output_path
from torch_pruner.codegen.tir.arithmetic import times
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    index_var,
    loop,
    prefetch,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import Index, held, imm, linear
from torch_pruner.codegen.tir.values import store
from torch_pruner.graph.ops import ITEMSIZE, OpKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.parts.operands import Nest
    from torch_pruner.graph.extents import Bounds
    from torch_pruner.graph.ir import Graph

_LINE = 64  # bytes


@dataclass(frozen=True, slots=True)
class TilePosition:
    """Which part of the work a register tile does."""

    g: Expr  # group
    nb: Expr  # column panel
    vectors: int  # of the panel
    kb: Expr  # block of the reduction
    tile: Expr  # rows
    turn: tuple[Expr, int]  # which of how many tiles of a panel
    number: Expr  # of the tile among all of the kernel


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one register tile."""

    at: Callable[[Expr], Index]
    """Index of row ``i`` of the tile; all of them exist."""
    own: Callable[[Expr], Expr] | None = None
    """Whether row ``i`` is this tile's to store (None: all are)."""
    bind: Stmt | None = None


@dataclass(frozen=True, slots=True)
class TileTraversal:
    """How tiles take their rows, and how they pass over a block of the reduction."""

    rows: Callable[[Expr], Rows]
    """The rows of a tile, by its number."""
    passing: Callable[
        [TilePosition, Rows, Callable[[Index], Stmt], Callable[[Stmt], Stmt] | None], Stmt
    ]
    """The loops around an update; the last argument wraps each part after which sums begin anew."""
    parts: bool = False
    """Whether sums are begun anew within a block."""


def first_rows(
    tile: Expr, tm: int, extent: int
) -> tuple[Callable[[Expr], Expr] | None, Stmt, Expr]:
    """For a tile of an axis: which rows are its own, a definition, and its first row.

    A last tile that is not full begins earlier; rows of the tile before are not its own.
    """
    start = index_var("first")
    if extent % tm == 0:
        return None, S.Bind(start, tile * tm), start
    bind = S.Bind(start, T.min(tile * tm, imm(extent - tm)))
    return (lambda i: start + i >= tile * tm), bind, start


def register_tile(nest: Nest, traversal: TileTraversal, place: TilePosition) -> Stmt:
    """One register tile over one block of the reduction."""
    con, vl, bn = nest.con, nest.vl, nest.bn
    zero = T.const(0, con.acc_dtype)
    g, nb = place.g, place.nb
    rows = traversal.rows(place.tile)
    # Indices are constants once loops are unrolled: LLVM keeps the tile in registers.
    acc = buffer(nest.tm * bn, con.acc_dtype, "acc", scope="local")

    def each(body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
        def vector(i: Expr, j: Expr) -> Stmt:
            return loop(vl, lambda v: body(i, j, v), VECTORIZED, "v")

        def row(i: Expr) -> Stmt:
            return loop(place.vectors, lambda j: vector(i, j), UNROLLED, "j")

        return loop(nest.tm, row, UNROLLED, "i")

    def update(k: Index) -> Stmt:
        def step(i: Expr, j: Expr, v: Expr) -> Stmt:
            lane = j * vl + v
            at = i * bn + lane
            if nest.rows is not None:
                a = row_at(nest, g, place.tile, i, k)
            else:
                a = a_at(nest, g, rows.at(i), k, nb * bn + lane).astype(con.acc_dtype)
            b = b_at(nest, g, nb, k, nb * bn + lane, lane, place.kb).astype(con.acc_dtype)
            return store(acc, at, acc[at] + times(a, b, con.acc_dtype))

        return each(step)

    def clear(buf: Buffer) -> Stmt:
        return each(lambda i, j, v: store(buf, i * bn + j * vl + v, zero))

    def add(buf: Buffer, other: Buffer, first: Expr) -> Stmt:
        def step(i: Expr, j: Expr, v: Expr) -> Stmt:
            at = i * bn + j * vl + v
            return store(buf, at, buf[at] + other[first + at])

        return each(step)

    end = write_tile(nest, place, rows, acc)
    fetched = _fetch_ahead(nest, place, rows)
    if fetched is not None and nest.sums is not None:
        fetched = when(place.kb == nest.kb - 1, fetched)
    if (sums := nest.sums) is not None:
        first = place.number * (nest.tm * bn)
        more = add(acc, sums, first)
        kept = each(lambda i, j, v: _keep(sums, acc, first, i * bn + j * vl + v))
        end = seq([when(place.kb > 0, more), when(place.kb == nest.kb - 1, end, kept)])
    needless = _beyond(nest, place, rows, nest.unneeded - nest.unwritten)

    def products(part: Callable[[Stmt], Stmt] | None = None) -> Stmt:
        return unless(needless, traversal.passing(place, rows, update, part))

    if not traversal.parts:
        body = [clear(acc), fetched, products(), end]
    else:
        total = buffer(nest.tm * bn, con.acc_dtype, "total", scope="local")

        def part(body: Stmt) -> Stmt:
            return seq([clear(acc), body, add(total, acc, imm(0))])

        whole = each(lambda i, j, v: store(acc, i * bn + j * vl + v, total[i * bn + j * vl + v]))
        body = [stack(total), clear(total), fetched, products(part), whole, end]
    tile = unless(_beyond(nest, place, rows, nest.unwritten), seq([stack(acc), *body]))
    return seq([rows.bind, tile])


def _keep(sums: Buffer, acc: Buffer, first: Expr, at: Expr) -> Stmt:
    """Leaves a sum of one block to the next."""
    return store(sums, first + at, acc[at])


def _beyond(nest: Nest, place: TilePosition, rows: Rows, bounds: Bounds) -> Expr | None:
    """Whether nobody needs the tile; ``bounds`` speak of the contraction's result."""
    if not bounds:
        return None
    node, column = nest.spec.nodes[nest.con.anchor], place.nb * nest.bn
    first, last = (
        linear(anchor_index(nest.con, place.g, rows.at(imm(i)), column), node.shape)
        for i in (0, nest.tm - 1)
    )
    return beyond(nest.reader, bounds, node.numel, first, last)


def _fetch_ahead(nest: Nest, place: TilePosition, rows: Rows) -> Stmt | None:
    """Fetches what the epilogue reads as much of as it writes, while sums are made.

    A tile reads pieces of lines that lie a row apart, which no prefetcher of a processor follows,
    all at once and at its end, when nothing else is left to do meanwhile.
    """
    spec, con, reader = nest.spec, nest.con, nest.reader
    path = output_path(spec, con.anchor)
    after = set(range(len(spec.nodes))) - _below(spec, con.anchor)
    whole = {
        i for i in after & set(spec.inputs) if spec.nodes[i].numel == spec.nodes[con.anchor].numel
    }
    if not whole or any(spec.nodes[i].kind is OpKind.INJECTIVE for i in after):
        return None
    read = {reader.buffers[i] for i in whole}
    reader.overrides[con.anchor] = held(nest.out, 0, spec.nodes[con.anchor].dtype)
    width = place.vectors * nest.vl

    def row(i: Expr) -> Stmt:
        position = rows.at(i)

        def places(column: int) -> list[tuple[Buffer, Expr]]:
            index = anchor_index(con, place.g, position, place.nb * nest.bn + column)
            return reader.places(path[-1], along(spec, path, index))

        line = _LINE // max(ITEMSIZE[spec.nodes[i].dtype] for i in whole)
        columns = dict.fromkeys((*range(0, width, line), width - 1))
        return seq([prefetch(b, at) for c in columns for b, at in places(c) if b in read])

    return loop(nest.tm, row, UNROLLED, "i")


def _below(spec: Graph, node: int) -> set[int]:
    """What ``node`` is made of."""
    found, stack = set[int](), [node]
    while stack:
        if (i := stack.pop()) not in found:
            found.add(i)
            stack.extend(spec.nodes[i].inputs)
    return found


def write_tile(
    nest: Nest, place: TilePosition, rows: Rows, acc: Buffer, first: Expr | int = 0
) -> Stmt:
    """The epilogue: every element of the tile through the rest of the graph, stored once.

    ``first``: where the tile's sums begin in ``acc``.
    """
    con, vl, bn = nest.con, nest.vl, nest.bn
    g, nb, vectors = place.g, place.nb, place.vectors
    path = output_path(nest.spec, con.anchor)
    shape, dtype = nest.spec.nodes[path[-1]].shape, nest.spec.nodes[con.anchor].dtype
    whole = vectors - 1 if con.n % vl and vectors == nest.last_vectors else vectors

    def row(i: Expr) -> Stmt:
        position = rows.at(i)

        def element(j: Expr, v: Expr) -> Stmt:
            index = along(nest.spec, path, anchor_index(con, g, position, nb * bn + j * vl + v))
            nest.reader.overrides[con.anchor] = held(acc, first + i * bn + j * vl + v, dtype)
            return nest.reader.scope(
                lambda: [store(nest.out, linear(index, shape), nest.reader.at(path[-1], index))]
            )

        def vector(j: Expr) -> Stmt:
            return loop(vl, lambda v: element(j, v), VECTORIZED, "v")

        def cut(j: Expr) -> Stmt:
            """The vector in which the last column lies, if the panel is the last."""
            first = nb * bn + j * vl
            single = loop(vl, lambda v: when(first + v < con.n, element(j, v)), name="v")
            return when(first + vl <= con.n, vector(j), single)

        body = [loop(whole, vector, UNROLLED, "j") if whole else None]
        body.append(cut(imm(whole)) if whole < vectors else None)
        return seq(body) if rows.own is None else when(rows.own(i), seq(body))

    return loop(nest.tm, row, UNROLLED, "i")
