"""Emits products of rows in groups: each task multiplies the rows of one group by some columns.

Tasks go by columns first and by groups then, so that threads have the same work however rows are
dealt. Within a task tiles of rows pass by a block of the matrix, which stays in a near cache, and
what is left of the group row by row. Along the reduction sums are kept by lane and added up at the
end; along the columns a sum has a lane, and long ones are summed in parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.lane_sums import fold_lanes
from torch_pruner.codegen.parts.operands import element
from torch_pruner.codegen.parts.pair_dots import SUMS, pair_dot, with_pair_dots
from torch_pruner.codegen.tir.arithmetic import times
from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    index_dtype,
    index_var,
    loop,
    seq,
    stack,
    vector,
    when,
)
from torch_pruner.codegen.tir.reader import Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.families.grouped_product.form import PAIRED, grouped_of, pairs_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.grouped_product.form import Grouped, GroupedProductDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

PART = 512  # products of a sum that has a lane, after which it is begun anew


def emit(spec: Graph, decisions: GroupedProductDecisions[int], signature: Signature) -> Emitted:
    """TIR for a product of rows in groups."""
    inputs, (out,), scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    nest = _Nest(spec, grouped_of(spec), reader, out, decisions)
    body = with_pair_dots(nest.tasks()) if decisions.dots else nest.tasks()
    return Emitted(body, inputs, [out], scratch)


@dataclass(frozen=True, slots=True)
class _Nest:
    """The loops around register tiles."""

    spec: Graph
    found: Grouped
    reader: Reader
    out: Buffer
    decisions: GroupedProductDecisions[int]

    def tasks(self) -> Stmt:
        """Blocks of columns outside, groups inside."""
        found, d = self.found, self.decisions
        units = found.units(d.vl)
        blocks = -(-units // (d.nc * d.nb))

        def task(p: Expr) -> Stmt:
            block, e = unlinear(p, (blocks, found.groups))
            first, end = index_var("first"), index_var("end")
            before = T.Select(e > 0, self._end(T.max(e - 1, imm(0))), imm(0))

            def tile(b: Expr) -> Stmt:
                begin = (block * d.nb + b) * d.nc
                body = self._rows(e, first, end, begin)
                return body if units % (d.nc * d.nb) == 0 else when(begin < units, body)

            binds = [S.Bind(first, before), S.Bind(end, self._end(e))]
            return seq([*binds, loop(d.nb, tile, name="b")])

        kind = PARALLEL if d.par else SERIAL
        return loop(blocks * found.groups, task, kind, "p")

    def _end(self, e: Expr) -> Expr:
        """Where a group ends, within the rows."""
        read = self.reader.at(self.found.ends, (e,)).astype("int64")
        rows = T.const(self.found.rows, "int64")
        return T.min(T.max(read, T.const(0, "int64")), rows).astype(index_dtype())

    def _rows(self, e: Expr, first: Expr, end: Expr, begin: Expr) -> Stmt:
        """All rows of a group by one block of columns; of the last group those behind, too."""
        found, tm = self.found, self.decisions.tm
        count = T.max(end - first, imm(0))
        parts = [
            loop(T.floordiv(count, imm(tm)), lambda t: self._tile(e, first + t * tm, tm, begin))
        ]
        if tm > 1:
            left = first + T.floordiv(count, imm(tm)) * tm
            parts.append(
                loop(T.floormod(count, imm(tm)), lambda i: self._tile(e, left + i, 1, begin))
            )
        zero = T.const(0, value_dtype(found.node.dtype))
        behind = loop(
            imm(found.rows) - end, lambda i: self.write(end + i, 1, begin, lambda *_: zero)
        )
        return seq([*parts, behind if found.groups == 1 else when(e >= found.groups - 1, behind)])

    def _tile(self, e: Expr, row: Expr, rows: int, begin: Expr) -> Stmt:
        tile = _Tile(self, e, row, rows, begin)
        return tile.along_k() if self.found.along_k else tile.along_columns()

    def unit(self, begin: Expr, c: Expr) -> Expr:
        """A column, or vector of columns; one that is there where a block has more than are."""
        d, units = self.decisions, self.found.units(self.decisions.vl)
        return begin + c if units % d.nc == 0 else T.min(begin + c, imm(units - 1))

    def write(
        self, row: Expr, rows: int, begin: Expr, value: Callable[[Expr, Expr, Expr], Expr]
    ) -> Stmt:
        """``value(i, c, v)`` of each row, column or vector of columns, and lane, where they
        belong."""
        d, found, units = self.decisions, self.found, self.found.units(self.decisions.vl)
        lanes = 1 if found.along_k else d.vl

        def element(i: Expr, c: Expr, v: Expr) -> Stmt:
            at = linear((row + i, (begin + c) * lanes + v), found.node.shape)
            return store(self.out, at, value(i, c, v))

        def column(i: Expr, c: Expr) -> Stmt:
            body = loop(lanes, lambda v: element(i, c, v), VECTORIZED, "v")
            return body if units % d.nc == 0 else when(begin + c < units, body)

        def line(i: Expr) -> Stmt:
            return loop(d.nc, lambda c: column(i, c), UNROLLED, "c")

        return loop(rows, line, UNROLLED, "i")


@dataclass(frozen=True, slots=True)
class _Tile:
    """A register tile: some rows of a group by a block of columns."""

    nest: _Nest
    e: Expr
    row: Expr
    rows: int
    begin: Expr

    @property
    def _dtype(self) -> str:
        return value_dtype(self.nest.found.node.dtype)

    @property
    def _sum_dtype(self) -> str:
        return "float32" if self._dtype == "float16" else self._dtype

    def _x(self, i: Expr, k: Expr) -> Expr:
        found = self.nest.found
        return self.nest.reader.at(found.x, (self.row + i, k)).astype(self._sum_dtype)

    def _matrix(self, k: Expr, column: Expr) -> Expr:
        found = self.nest.found
        return self.nest.reader.at(found.matrices, (self.e, k, column)).astype(self._sum_dtype)

    def _each(self, body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
        """``body(i, c, v)``; rows inside, so that what they share is loaded once."""
        d = self.nest.decisions

        def lanes(i: Expr, c: Expr) -> Stmt:
            return loop(d.vl, lambda v: body(i, c, v), VECTORIZED, "v")

        def column(c: Expr) -> Stmt:
            return loop(self.rows, lambda i: lanes(i, c), UNROLLED, "i")

        return loop(d.nc, column, UNROLLED, "c")

    def _at(self, i: Expr, c: Expr) -> Expr:
        return (i * self.nest.decisions.nc + c) * self.nest.decisions.vl

    def _steps(self, start: Expr, count: int, step: Callable[[Expr], Stmt]) -> Stmt:
        """``step`` of so many numbers from ``start`` on, some of them written out."""
        ku = self.nest.decisions.ku
        whole, rest = divmod(count, ku)

        def unrolled(s: Expr) -> Stmt:
            return loop(ku, lambda u: step(start + s * ku + u), UNROLLED, "u")

        left = start + whole * ku
        more = loop(rest, lambda u: step(left + u), UNROLLED, "u") if rest else None
        return seq([loop(whole, unrolled, name="k") if whole else None, more])

    def _scoped(self, emit: Callable[[], Stmt]) -> Stmt:
        return self.nest.reader.scope(lambda: [emit()])

    def along_k(self) -> Stmt:
        """Sums by lane, along the reduction; then across lanes."""
        nest, d = self.nest, self.nest.decisions
        size = self.rows * d.nc * d.vl
        acc = buffer(size, self._sum_dtype, "acc", scope="local")
        zero = T.const(0, self._sum_dtype)

        def step(s: Expr) -> Stmt:
            def add(i: Expr, c: Expr, v: Expr) -> Stmt:
                k, at = s * d.vl + v, self._at(i, c) + v
                factors = self._x(i, k), self._matrix(k, nest.unit(self.begin, c))
                return store(acc, at, acc[at] + times(*factors, self._sum_dtype))

            return self._scoped(lambda: self._each(add))

        def fold(i: Expr, c: Expr) -> Stmt:
            return seq(fold_lanes(acc, self._at(i, c), d.vl))

        def column(c: Expr) -> Stmt:
            return loop(self.rows, lambda i: fold(i, c), UNROLLED, "i")

        clear = self._each(lambda i, c, v: store(acc, self._at(i, c) + v, zero))
        if d.dots:
            summed = self._steps(
                imm(0), nest.found.depth // PAIRED, lambda s: self._dots(acc, s * PAIRED)
            )
        else:
            summed = self._steps(imm(0), nest.found.depth // d.vl, step)
        across = loop(d.nc, column, UNROLLED, "c") if d.vl > 1 else None
        written = nest.write(
            self.row, self.rows, self.begin, lambda i, c, _: self._result(acc, self._at(i, c))
        )
        return seq([stack(acc), clear, summed, across, written])

    def _dots(self, acc: Buffer, k: Expr) -> Stmt:
        """Pairs from ``k`` on, a vector of them, added to the sums."""
        nest, found = self.nest, self.nest.found
        places = pairs_of(nest.spec, found)
        assert places is not None
        x, matrices = places

        def words(source: int, at: Expr) -> Expr:
            return T.reinterpret(f"int32x{SUMS}", nest.reader.buffers[source][vector(at, PAIRED)])

        def add(i: Expr, c: Expr) -> Stmt:
            rows = words(x.source, element(x, (self.row + i, k)))
            column = nest.unit(self.begin, c)
            columns = words(matrices.source, element(matrices, (self.e, k, column)))
            at = vector(self._at(i, c), SUMS)
            return S.BufferStore(acc, pair_dot(acc[at], rows, columns), [at])

        def column(c: Expr) -> Stmt:
            return loop(self.rows, lambda i: add(i, c), UNROLLED, "i")

        return loop(nest.decisions.nc, column, UNROLLED, "c")

    def along_columns(self) -> Stmt:
        """Sums of columns that are neighbours, each with a lane of its own."""
        nest, d, depth = self.nest, self.nest.decisions, self.nest.found.depth
        size = self.rows * d.nc * d.vl
        acc = buffer(size, self._sum_dtype, "acc", scope="local")
        total = buffer(size, self._sum_dtype, "total", scope="local")
        zero = T.const(0, self._sum_dtype)

        def step(k: Expr) -> Stmt:
            def add(i: Expr, c: Expr, v: Expr) -> Stmt:
                at = self._at(i, c) + v
                column = nest.unit(self.begin, c) * d.vl + v
                factors = self._x(i, k), self._matrix(k, column)
                return store(acc, at, acc[at] + times(*factors, self._sum_dtype))

            return self._scoped(lambda: self._each(add))

        def cleared(buf: Buffer) -> Stmt:
            return self._each(lambda i, c, v: store(buf, self._at(i, c) + v, zero))

        def folded(i: Expr, c: Expr, v: Expr) -> Stmt:
            at = self._at(i, c) + v
            return store(total, at, total[at] + acc[at])

        def part(start: Expr, count: int) -> Stmt:
            return seq([cleared(acc), self._steps(start, count, step), self._each(folded)])

        parts, rest = divmod(depth, PART)
        if depth <= PART:
            sums, body = acc, [stack(acc), cleared(acc), self._steps(imm(0), depth, step)]
        else:
            sums, body = total, [stack(acc), stack(total), cleared(total)]
            body.append(loop(parts, lambda o: part(o * PART, PART), name="part"))
            body += [part(imm(parts * PART), rest)] if rest else []
        written = nest.write(
            self.row, self.rows, self.begin, lambda i, c, v: self._result(sums, self._at(i, c) + v)
        )
        return seq([*body, written])

    def _result(self, sums: Buffer, at: Expr) -> Expr:
        return sums[at].astype(self._dtype)
