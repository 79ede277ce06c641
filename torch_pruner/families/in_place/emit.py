"""Emits products of few rows that read the second operand where it lies, along the reduction.

A parallel task takes blocks of one vector of columns. Columns are summed ``nc`` at a time, each by
``nv`` vectors along the reduction, and every vector of it is used for all rows; the sums across
lanes are gathered, so that the epilogue has a vector of columns. A last vector of the reduction
that is not full begins earlier, and what was counted already is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.copies import copy_first
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.lane_sums import fold_lanes
from torch_pruner.codegen.parts.operands import Nest, a_at
from torch_pruner.codegen.parts.row_tiles import Rows, TilePosition, write_tile
from torch_pruner.codegen.tir.arithmetic import times
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
    when,
)
from torch_pruner.codegen.tir.reader import Reader, imm, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.in_place.form import in_place_of
from torch_pruner.families.in_place.reading import Reading, reading_of
from torch_pruner.graph.contraction import dealt

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.in_place.form import InPlaceDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

_PART = 256  # products of a lane, after which its sum is begun anew


def emit(
    spec: Graph,
    decisions: InPlaceDecisions[int],
    signature: Signature,
    read: Callable[[Nest, list[Buffer]], Reading] | None = None,
) -> Emitted:
    """TIR for a product of few rows.

    ``read`` says how the second operand is read, of the kernel's inputs. Default: as it lies.
    """
    found = in_place_of(spec)
    assert found is not None
    inputs, (out,), scratch = parameters(signature)
    nest = Nest(
        spec,
        found.con,
        Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        decisions.vl,
        tm=found.con.rows,
        nv=1,
        ku=decisions.nv,
        parallel=bool(decisions.par),
        ahead=False,
        panel=None,
        copied=scratch[0] if scratch else None,
        sums=None,
        out=out,
    )
    copied = copy_first(nest) if found.copied else None
    reading = reading_of(nest) if read is None else read(nest, inputs)
    body = seq([copied, _tasks(nest, reading, decisions)])
    return Emitted(body, inputs, [out], scratch)


def _tasks(nest: Nest, reading: Reading, decisions: InPlaceDecisions[int]) -> Stmt:
    """Blocks of columns in the order in which they lie, ``nb`` of a group to a task."""
    tasks, each = dealt(nest.blocks, -(-nest.blocks // decisions.nb))

    def task(p: Expr) -> Stmt:
        g, share = unlinear(p, (nest.con.groups, tasks))

        def block(j: Expr) -> Stmt:
            nb = share * each + j
            body = _block(nest, reading, decisions, g, nb)
            return body if nest.blocks % each == 0 else when(nb < nest.blocks, body)

        return loop(each, block, name="nb")

    return loop(nest.con.groups * tasks, task, nest.kind, name="p")


def _block(
    nest: Nest, reading: Reading, decisions: InPlaceDecisions[int], g: Expr, nb: Expr
) -> Stmt:
    """A vector of columns: their sums, then the epilogue."""
    con, vl, together = nest.con, nest.vl, decisions.nc
    tiles = nest.tm * together
    # Indices are constants once loops are unrolled: LLVM keeps these in registers.
    acc = buffer(tiles * nest.ku * vl, con.acc_dtype, "acc", scope="local")
    total = buffer(tiles * vl, con.acc_dtype, "total", scope="local")
    sums = buffer(nest.tm * vl, con.acc_dtype, "sums", scope="local")
    wide = buffer(together * vl, con.acc_dtype, "wide", scope="local")

    def columns(q: Expr) -> Stmt:
        first = nb * vl + q * together
        held = (acc, total, sums, wide)
        part = _Columns(nest, reading, together, decisions.ahead, g, first, q * together, *held)
        body = part.summed()
        return body if con.n % vl == 0 else when(first < con.n, body)

    place = TilePosition(g, nb, 1, imm(0), imm(0), (imm(0), 1), imm(0))
    rows = Rows(lambda i: unlinear(i, con.m))
    passing = loop(vl // together, columns, name="q")
    buffers = [stack(buf) for buf in (acc, total, sums, wide)]
    return seq([*buffers, passing, write_tile(nest, place, rows, sums)])


@dataclass(frozen=True, slots=True)
class _Columns:
    """Neighbouring columns that are summed together, for all rows."""

    nest: Nest
    reading: Reading
    together: int
    ahead: int  # bytes
    g: Expr
    first: Expr  # column
    lane: Expr  # of it in a vector of sums
    acc: Buffer  # a vector of lanes for every vector of a step, column and row
    total: Buffer  # the same, of all vectors
    sums: Buffer  # (row, column of the block)
    wide: Buffer  # a vector of the second operand for every column

    def summed(self) -> Stmt:
        """The products along the reduction, and the sums across lanes, stored to ``sums``."""
        depth, vl, nv = self.nest.con.k[-1], self.nest.vl, self.nest.ku
        whole, left = divmod(depth, vl)
        if not whole:
            return self._short(depth)
        part = _PART * nv
        zero = T.const(0, self.nest.con.acc_dtype)
        body = [self._each(lambda i, c, v: store(self.total, self._at(i, c) + v, zero))]
        parts, rest = divmod(whole, part)
        if parts:
            body.append(loop(parts, lambda o: self._run(o * (part * vl), part), name="part"))
        if rest:
            body.append(self._run(imm(parts * part * vl), rest))
        if left:
            body.append(self._last(depth - vl, vl - left))
        return seq([*body, self._tiles(self._across)])

    def _tiles(self, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """``body(i, c)`` for each row and column; rows inside, so that a vector is loaded once."""
        rows = self.nest.tm

        def column(c: Expr) -> Stmt:
            return loop(rows, lambda i: body(i, c), UNROLLED, "i")

        return loop(self.together, column, UNROLLED, "c")

    def _each(self, body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
        vl = self.nest.vl
        return self._tiles(lambda i, c: loop(vl, lambda v: body(i, c, v), VECTORIZED, "v"))

    def _at(self, i: Expr, c: Expr) -> Expr:
        return (c * self.nest.tm + i) * self.nest.vl

    def _column(self, c: Expr) -> Expr:
        n, at = self.nest.con.n, self.first + c
        return at if n % self.together == 0 else T.min(at, imm(n - 1))

    def _first(self, i: Expr, c: Expr, k: Expr) -> Expr:
        """An element of the first operand."""
        con = self.nest.con
        index = (*(imm(0),) * (len(con.k) - 1), k)
        a = a_at(self.nest, self.g, unlinear(i, con.m), index, self._column(c))
        return a.astype(con.acc_dtype)

    def _vectors(self, k: Expr, use: Callable[[Expr, Expr, Expr, Expr], Stmt]) -> Stmt:
        """``use(i, c, v, product)`` for each row, column and lane of a vector from ``k`` on."""
        vl, wide, dtype = self.nest.vl, self.wide, self.nest.con.acc_dtype

        def column(c: Expr) -> Stmt:
            def lane(i: Expr, v: Expr) -> Stmt:
                product = times(self._first(i, c, k + v), wide[c * vl + v], dtype)
                return use(i, c, v, product)

            def row(i: Expr) -> Stmt:
                return loop(vl, lambda v: lane(i, v), VECTORIZED, "v")

            begin = self.reading.widen(self.g, self._column(c), k, wide, c * vl)
            return seq([begin, loop(self.nest.tm, row, UNROLLED, "i")])

        return loop(self.together, column, UNROLLED, "c")

    def _run(self, start: Expr, vectors: int) -> Stmt:
        """So many vectors of the reduction from a position on, added to the total."""
        vl, nv, acc, total = self.nest.vl, self.nest.ku, self.acc, self.total
        used, size = min(nv, vectors), self.nest.tm * self.together * vl
        zero = T.const(0, self.nest.con.acc_dtype)

        def clear(u: Expr) -> Stmt:
            return self._each(lambda i, c, v: store(acc, u * size + self._at(i, c) + v, zero))

        def update(u: Expr, k: Expr) -> Stmt:
            def add(i: Expr, c: Expr, v: Expr, product: Expr) -> Stmt:
                at = u * size + self._at(i, c) + v
                return store(acc, at, acc[at] + product)

            return self._vectors(k, add)

        def fold(u: Expr) -> Stmt:
            def add(i: Expr, c: Expr, v: Expr) -> Stmt:
                at = self._at(i, c) + v
                return store(total, at, total[at] + acc[u * size + at])

            return self._each(add)

        def step(s: Expr) -> Stmt:
            k = start + s * (nv * vl)
            return seq([self._fetch(k), loop(nv, lambda u: update(u, k + u * vl), UNROLLED, "u")])

        steps, rest = divmod(vectors, nv)
        left = start + steps * nv * vl
        more = loop(rest, lambda u: update(u, left + u * vl), UNROLLED, "u") if rest else None
        passing = loop(steps, step, name="k") if steps else None
        begin, end = loop(used, clear, UNROLLED, "u"), loop(used, fold, UNROLLED, "u")
        return seq([begin, passing, more, end])

    def _last(self, begin: int, counted: int) -> Stmt:
        """The last vector, of which the first lanes were counted already."""
        total, zero = self.total, T.const(0, self.nest.con.acc_dtype)

        def add(i: Expr, c: Expr, v: Expr, product: Expr) -> Stmt:
            at = self._at(i, c) + v
            return store(total, at, total[at] + T.Select(v >= imm(counted), product, zero))

        return self._vectors(imm(begin), add)

    def _across(self, i: Expr, c: Expr) -> Stmt:
        """The sum across lanes: halves of a vector, and halves of those."""
        total, first = self.total, self._at(i, c)
        to = i * self.nest.vl + self.lane + c
        folded = fold_lanes(total, first, self.nest.vl)
        return seq([*folded, store(self.sums, to, total[first])])

    def _short(self, depth: int) -> Stmt:
        """The sums of a reduction that fills no vector."""
        zero, sums = T.const(0, self.nest.con.acc_dtype), self.sums

        def to(i: Expr, c: Expr) -> Expr:
            return i * self.nest.vl + self.lane + c

        def single(k: Expr) -> Stmt:
            def add(i: Expr, c: Expr) -> Stmt:
                b = self.reading.at(self.g, self._column(c), k)
                product = times(self._first(i, c, k), b, self.nest.con.acc_dtype)
                return store(sums, to(i, c), sums[to(i, c)] + product)

            return self._tiles(add)

        begin = self._tiles(lambda i, c: store(sums, to(i, c), zero))
        return seq([begin, loop(depth, single, name="k")])

    def _fetch(self, k: Expr) -> Stmt | None:
        """Fetches what is read ``ahead`` bytes later, or, of several columns, the next ones.

        Those are fetched in the order in which they lie, a part in each step: one long stream, and
        no line twice.
        """
        g, many, vectors, reading = self.g, self.together, self.nest.ku, self.reading
        if not self.ahead:
            return None
        if many == 1:
            return reading.fetch(g, self.first, k, vectors, self.ahead)
        if reading.columns_are_neighbours:
            return reading.fetch(g, self.first + many, k * many, vectors * many, 0)
        following = [self.first + many + c for c in range(many)]
        return seq([reading.fetch(g, column, k, vectors, 0) for column in following])
