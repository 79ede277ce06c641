"""Vectors of the second operand along the reduction, as floats: what its format decides.

In: a column and a position of the reduction. Out: statements that leave ``vl`` values of the dtype
of the sums in a buffer, which the compiler keeps in registers. How columns are shared, summed and
written is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.operands import element, second_index, second_operand
from torch_pruner.codegen.tir.builders import VECTORIZED, Buffer, Expr, Stmt, loop, prefetch, seq
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.codegen.tir.values import store
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.strided import strided

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.operands import Nest
    from torch_pruner.codegen.tir.reader import Index

_LINE = 64  # bytes


@dataclass(frozen=True, slots=True)
class Reading:
    """Elements that the graph has as they are: floats of any width, and int8.

    A format of its own is a subclass that ``reading_of`` chooses, with what it costs in
    ``form.format_of``. All it has to say is ``at``; ``widen`` where many come out of one load.
    """

    nest: Nest

    def at(self, g: Expr, column: Expr, k: Expr) -> Expr:
        """One value, in the dtype of the sums."""
        return second_operand(self.nest, g, self._index(k), column).astype(self.nest.con.acc_dtype)

    def widen(self, g: Expr, column: Expr, k: Expr, to: Buffer, first: Expr) -> Stmt:
        """``to[first:first + vl]`` are the values of a column from ``k`` on.

        ``k`` is a multiple of ``vl``, but for the last vector of a reduction that is none.
        """
        return loop(
            self.nest.vl,
            lambda v: store(to, first + v, self.at(g, column, k + v)),
            VECTORIZED,
            "v",
        )

    @property
    def columns_are_neighbours(self) -> bool:
        """Whether a column begins where the one before it ends."""
        con, place = self.nest.con, strided(self.nest.spec, self.nest.con.b)
        return con.conv is None and place is not None and place.strides[-1] == con.k[-1]

    def fetch(self, g: Expr, column: Expr, k: Expr, vectors: int, ahead: int) -> Stmt | None:
        """Fetches so many vectors of a column from ``ahead`` bytes after ``k`` on.

        Only a hint: addresses may lie behind the operand.
        """
        nest = self.nest
        place = strided(nest.spec, nest.con.b)
        if place is None:
            return None
        size = ITEMSIZE[nest.spec.nodes[nest.con.b].dtype]
        lines = max(1, vectors * nest.vl * size // _LINE)
        source = nest.reader.buffers[place.source]
        at = element(place, second_index(nest.con, g, self._index(k), column)) + ahead // size
        return seq([prefetch(source, at + j * (_LINE // size), once=True) for j in range(lines)])

    def _index(self, k: Expr) -> Index:
        return (*(imm(0),) * (len(self.nest.con.k) - 1), k)


def reading_of(nest: Nest) -> Reading:
    """How the second operand of a product is read."""
    return Reading(nest)
