"""Emits products of few rows that read the second operand where it lies, row after row.

A parallel task takes a chunk of columns, whose sums stay in the first cache. ``ku`` rows of the
second operand pass at a time, each times its element of the first one, and are added to the sums
together: each row is read in one long piece, and sums are loaded and stored once in ``ku`` rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import Nest, a_at, element, second_index, second_operand
from torch_pruner.codegen.parts.row_tiles import Rows, TilePosition, write_tile
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
    loop,
    prefetch,
    seq,
    workspace,
)
from torch_pruner.codegen.tir.reader import Reader, imm, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.in_place.form import axpy_of
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.strided import strided

if TYPE_CHECKING:
    from torch_pruner.families.axpy.form import AxpyDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

_LINE = 64  # bytes


def emit(spec: Graph, decisions: AxpyDecisions[int], signature: Signature) -> Emitted:
    """TIR for a product of few rows."""
    con = axpy_of(spec)
    assert con is not None
    inputs, (out,), scratch = parameters(signature)
    nest = Nest(
        spec,
        con,
        Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        decisions.vl,
        tm=con.rows,
        nv=1,
        ku=decisions.ku,
        parallel=bool(decisions.par),
        ahead=bool(decisions.ahead),
        panel=None,
        copied=None,
        sums=None,
        out=out,
    )
    return Emitted(_tasks(nest, decisions.cv), inputs, [out], scratch)


def _tasks(nest: Nest, vectors: int) -> Stmt:
    con, vl = nest.con, nest.vl
    chunks, size = nest.blocks // vectors, con.rows * vl
    sums = buffer(vectors * size, con.acc_dtype, "sums")

    def task(p: Expr) -> Stmt:
        g, chunk = unlinear(p, (con.groups, chunks))
        first = chunk * vectors

        def write(j: Expr) -> Stmt:
            place = TilePosition(g, first + j, 1, imm(0), imm(0), (imm(0), 1), imm(0))
            return write_tile(nest, place, Rows(lambda i: (i,)), sums, j * size)

        def clear(j: Expr) -> Stmt:
            zero = T.const(0, con.acc_dtype)
            return loop(vl, lambda v: store(sums, j * vl + v, zero), VECTORIZED, "v")

        steps, rest = divmod(con.depth, nest.ku)

        def rows(k: Expr, count: int) -> Stmt:
            return _rows(nest, g, first, vectors, k, count, sums)

        body = [
            loop(vectors * con.rows, clear, name="j"),
            loop(steps, lambda s: rows(s * nest.ku, nest.ku), name="k") if steps else None,
            rows(imm(steps * nest.ku), rest) if rest else None,
            loop(vectors, write, name="j"),
        ]
        return workspace(sums, seq(body))

    return loop(con.groups * chunks, task, nest.kind, name="p")


def _rows(
    nest: Nest, g: Expr, first: Expr, vectors: int, k: Expr, count: int, sums: Buffer
) -> Stmt:
    """Adds ``count`` rows of the second operand, from ``k`` on, to all sums of a chunk."""
    con, vl, dtype = nest.con, nest.vl, nest.con.acc_dtype
    factors, binds = {}, []
    for i in range(con.rows):
        for u in range(count):
            factors[i, u] = T.Var(f"a{i}_{u}", dtype)
            value = a_at(nest, g, (imm(i),), (k + u,), imm(0)).astype(dtype)
            binds.append(S.Bind(factors[i, u], value))

    def vector(j: Expr) -> Stmt:
        def row(i: int) -> Stmt:
            def lane(v: Expr) -> Stmt:
                column = (first + j) * vl + v
                total: Expr | None = None
                for u in range(count):
                    b = second_operand(nest, g, (k + u,), column).astype(dtype)
                    product = times(factors[i, u], b, dtype)
                    total = product if total is None else total + product
                assert total is not None
                at = (j * con.rows + i) * vl + v
                return store(sums, at, sums[at] + total)

            return loop(vl, lane, VECTORIZED, "v")

        return seq([row(i) for i in range(con.rows)])

    def line(t: Expr, each: int) -> Stmt:
        """Vectors that fill a line of each row, and that line of the rows that are next."""
        begin = _fetch(nest, g, (first + t * each) * vl, k + count, count) if nest.ahead else None
        return seq([begin, loop(each, lambda j: vector(t * each + j), UNROLLED, "v")])

    each = max(1, _LINE // (vl * ITEMSIZE[nest.spec.nodes[con.b].dtype]))
    each = each if nest.ahead and vectors % each == 0 else 1
    return seq([*binds, loop(vectors // each, lambda t: line(t, each), name="j")])


def _fetch(nest: Nest, g: Expr, column: Expr, k: Expr, count: int) -> Stmt:
    """Fetches a line of so many rows of the second operand, which may lie behind its end."""
    place = strided(nest.spec, nest.con.b)
    assert place is not None
    source = nest.reader.buffers[place.source]
    at = [element(place, second_index(nest.con, g, (k + u,), column)) for u in range(count)]
    return seq([prefetch(source, a, once=True) for a in at])
