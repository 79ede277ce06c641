"""Updates on a GPU: a block writes a part of one row, unless a later row is for the same place.

Whether there is one its threads find out together: each compares some of the positions, and what
they have found is joined within warps, and then in shared memory. A single row needs none of that.
Where the result is not in the value's memory, a launch of its own copies the value first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.grid import WARP, Grid, Registers, in_blocks
from torch_pruner.codegen.parts.gpu.lanes import DISTANCES, exchanged
from torch_pruner.codegen.parts.gpu.sweeps import over_threads, together
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.parts.sweeps import store_outputs
from torch_pruner.codegen.tir.builders import (
    SERIAL,
    UNROLLED,
    Buffer,
    Expr,
    Stmt,
    T,
    loop,
    seq,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.gpu_update.form import Rows, rows_of

if TYPE_CHECKING:
    from torch_pruner.families.gpu_update.form import GpuUpdateDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(
    spec: Graph,
    decisions: GpuUpdateDecisions[int],
    signature: Signature,
    *,
    host: bool = False,
) -> Emitted:
    """TIR for an update."""
    inputs, outputs, scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    rows = rows_of(spec)
    parts = []
    if not spec.nodes[rows.update].attr("in_place"):
        x = spec.nodes[rows.update].inputs[0]
        before = Reader(spec, reader.buffers, {rows.update: lambda index: before.at(x, index)})

        def one(index: Index) -> Stmt:
            return store_outputs(spec, before, outputs, index)

        parts.append(over_threads(spec, decisions.vl, decisions.threads, one, host=host))
    parts.append(_Update(spec, reader, outputs[0], rows, decisions, host).launch())
    return Emitted(seq(parts), inputs, outputs, scratch)


@dataclass(frozen=True, slots=True)
class _Update:
    """The rows."""

    spec: Graph
    reader: Reader
    out: Buffer
    rows: Rows
    decisions: GpuUpdateDecisions[int]
    host: bool

    def launch(self) -> Stmt:
        rows, d = self.rows, self.decisions
        groups = math.prod(rows.line) // d.vl
        parts = in_blocks(groups, d.threads)
        grid = Grid(rows.count * parts, d.threads, self.host)
        if rows.count > 1:
            later = grid.registers(1, "int32", "later")
            units = d.threads if self.host else d.threads // WARP
            left = grid.shared(units, "int32", "left")

        def block(number: Expr) -> Stmt:
            row = T.floordiv(number, parts) if parts > 1 else number
            part = T.floormod(number, parts) if parts > 1 else imm(0)

            def write(tid: Expr) -> Stmt:
                group = part * d.threads + tid
                body = self._write(row, group * d.vl)
                return when(group < groups, body) if groups % d.threads else body

            if rows.count == 1:
                return grid.phases(write)

            def unless_later(tid: Expr) -> Stmt:
                at = later.at(tid, 0)

                def join(unit: Expr) -> Stmt:
                    return store(later.buffer, at, T.bitwise_or(later.buffer[at], left[unit]))

                none = T.EQ(later.buffer[at], imm(0).astype("int32"))
                return seq([loop(units, join, SERIAL, "unit"), when(none, write(tid))])

            return grid.phases(lambda tid: self._look(row, tid, later, left), unless_later)

        return grid.launch(block)

    def _look(self, row: Expr, tid: Expr, later: Registers, left: Buffer) -> Stmt:
        """Leave whether one of the rows that a warp looks at is for the place of ``row``, and comes
        after it; on the host, of those that a thread looks at."""
        rows, threads, at = self.rows, self.decisions.threads, later.at(tid, 0)
        one, none = (T.const(n, "int32") for n in (1, 0))

        def some(r: Expr) -> Stmt:
            other = r * threads + tid

            def found() -> list[Stmt]:
                pairs = zip(self._found(row), self._found(other), strict=True)
                same = [T.EQ(mine, its) for mine, its in pairs]
                return [when(T.all(*same), store(later.buffer, at, one))]

            after = [other > row, other < rows.count]
            return when(T.all(*after), self.reader.scope(found))

        stmts = [store(later.buffer, at, none)]
        stmts.append(loop(in_blocks(rows.count, threads), some, SERIAL, "round"))
        if self.host:
            return seq([*stmts, store(left, tid, later.buffer[at])])
        for distance in DISTANCES:
            binds, own, other = exchanged(later.buffer[at], "int32", distance)
            stmts += [*binds, store(later.buffer, at, T.bitwise_or(own, other))]
        first = T.EQ(T.floormod(tid, WARP), imm(0))
        return seq([*stmts, when(first, store(left, T.floordiv(tid, WARP), later.buffer[at]))])

    def _found(self, row: Expr) -> list[Expr]:
        """Positions along the axes that indices name."""
        node = self.spec.nodes[self.rows.update]
        place, dim = unlinear(row, self.rows.places), node.attr("dim")
        return [
            self.reader.position(index, place, node.shape[dim + k])
            for k, index in enumerate(node.inputs[2:])
        ]

    def _write(self, row: Expr, first: Expr) -> Stmt:
        """``vl`` neighbours of a row, from ``first`` on."""
        spec, rows = self.spec, self.rows
        node = spec.nodes[rows.update]
        path, final = output_path(spec, rows.update), spec.nodes[spec.outputs[0]].shape
        place = unlinear(row, rows.places)

        def stores() -> list[Stmt]:
            found = self._found(row)

            def lane(v: Expr) -> Stmt:
                line = unlinear(first + v, rows.line)
                before, after = line[: len(rows.lead)], line[len(rows.lead) :]
                target = along(spec, path, (*before, *found, *after))

                def value() -> list[Stmt]:
                    given = self.reader.at(node.inputs[1], (*before, *place, *after))
                    return [store(self.out, linear(target, final), given)]

                return self.reader.scope(value)

            # Where the result's axes are in another order, neighbours may lie apart.
            kind = together(spec) if len(path) == 1 else UNROLLED
            return [loop(self.decisions.vl, lane, kind, "v")]

        return self.reader.scope(stores)
