"""The epilogue of a tile: its sums through the rest of the graph, by vectors of columns or rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.output import along, anchor_index, output_path
from torch_pruner.codegen.parts.transposed import in_square
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    ForKind,
    S,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    simplified,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import Index, imm, linear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.bf16_pairs.form import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.bf16_pairs.nest import PairNest


def write(nest: PairNest, g: Expr, nb: Expr, row: Index, acc: Callable[[Expr], tuple[Buffer, Expr]],
          kind: ForKind) -> Stmt:  # fmt: skip
    """The epilogue of the row at index ``row``: all through the rest of the graph, stored once.

    ``acc(column)`` is where the sums are; ``kind`` of the loop over vectors.
    """
    n = nest.con.n

    def vector(j: Expr) -> Stmt:
        first = nb * nest.block + j * COLUMNS

        def element(v: Expr) -> Stmt:
            return _finished(nest, g, row, first + v, acc(j * COLUMNS + v))

        whole = loop(COLUMNS, element, VECTORIZED, "v")
        if n % nest.block == 0:
            return whole
        single = loop(COLUMNS, lambda v: when(first + v < n, element(v)), name="v")
        return when(first + COLUMNS <= n, whole, single)

    return loop(nest.block // COLUMNS, vector, kind, name="j")


def write_turned(nest: PairNest, g: Expr, nb: Expr, tile: Expr, sums: Buffer, base: Expr) -> Stmt:
    """The epilogue of a tile of 16 rows, column after column, by vectors of rows.

    Its sums, from ``base`` on in ``sums``, are turned by squares for that. Results that do not lie
    side by side pass through memory: it is faster to store numbers than lanes.
    """
    size = COLUMNS * COLUMNS
    turned = buffer(size, "float32", "turned", scope="local")
    dtype = "bfloat16" if str(nest.out.dtype) == "uint16" else str(nest.out.dtype)
    stage = buffer(size, dtype, "stage", scope="local")
    side_by_side = distances(nest)[0] == 1

    def square(j: Expr) -> Stmt:
        def columns(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
            def column(i: Expr) -> Stmt:
                at = nb * nest.block + j * COLUMNS + i
                whole = body(i, at)
                return whole if nest.con.n % nest.block == 0 else when(at < nest.con.n, whole)

            return loop(COLUMNS, column, name="i")

        def finish(i: Expr, column: Expr) -> Stmt:
            def element(v: Expr) -> Stmt:
                row, acc = nest.row_index(tile, v), (turned, i * COLUMNS + v)
                place = None if side_by_side else (stage, i * COLUMNS + v)
                return _finished(nest, g, row, column, acc, place)

            return loop(COLUMNS, element, VECTORIZED, "v")

        def move(i: Expr, column: Expr) -> Stmt:
            def element(v: Expr) -> Stmt:
                at = _result(nest, g, nest.row_index(tile, v), column)[1]
                return S.BufferStore(nest.out, stage[i * COLUMNS + v], [at])

            return loop(COLUMNS, element, UNROLLED, "v")

        filled = in_square(
            nest,
            "float32",
            lambda i, v: sums[base + i * nest.block + j * COLUMNS + v],
            lambda i, v: (turned, i * COLUMNS + v),
        )
        parts = [stack(turned), filled]
        if not side_by_side:
            parts.append(stack(stage))
        parts.append(columns(finish))
        if not side_by_side:
            parts.append(columns(move))
        return seq(parts)

    return loop(nest.block // COLUMNS, square, name="j")


def distances(nest: PairNest) -> tuple[int, int]:
    """Elements from the result of a row of a tile to that of the next row, and column."""
    con = nest.con
    path = output_path(nest.spec, con.anchor)
    shape = nest.spec.nodes[path[-1]].shape

    def place(row: int, column: int) -> int:
        index = anchor_index(con, imm(0), nest.row_index(imm(0), imm(row)), imm(column))
        found = simplified(linear(along(nest.spec, path, index), shape))
        assert isinstance(found, T.IntImm)
        return int(found.value)

    first = place(0, 0)
    by_row = place(1, 0) - first if nest.rows > 1 else 0
    return by_row, place(0, 1) - first if con.n > 1 else 0


def _result(nest: PairNest, g: Expr, row: Index, column: Expr) -> tuple[Index, Expr]:
    """Index of a result in the graph's output, and its element there."""
    path = output_path(nest.spec, nest.con.anchor)
    index = along(nest.spec, path, anchor_index(nest.con, g, row, column))
    return index, linear(index, nest.spec.nodes[path[-1]].shape)


def _finished(
    nest: PairNest,
    g: Expr,
    row: Index,
    column: Expr,
    acc: tuple[Buffer, Expr],
    place: tuple[Buffer, Expr] | None = None,
) -> Stmt:
    """One element through the rest of the graph, to ``place`` if given; its sum is at ``acc``."""
    reader, buf, at = nest.reader, *acc
    index, element = _result(nest, g, row, column)
    target, to = place or (nest.out, element)
    reader.overrides[nest.con.anchor] = lambda _: buf[at]
    return reader.scope(lambda: [store(target, to, reader.at(nest.spec.outputs[0], index))])
