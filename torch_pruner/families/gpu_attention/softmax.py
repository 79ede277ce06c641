"""The graph's own expressions of a softmax, for scores that come a part at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.attention_tile import F32
from torch_pruner.codegen.parts.gpu.operands import lie_together
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.parts.reductions import combine, identity
from torch_pruner.codegen.tir.builders import Buffer, Expr, S, Stmt, T, index_var
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.values import store, value_dtype

if TYPE_CHECKING:
    from torch_pruner.graph.attention import Attention
    from torch_pruner.graph.ir import Graph

ZERO = T.const(0, F32)


@dataclass(frozen=True, slots=True)
class Softmax:
    """What a row of ``att`` subtracts, its powers, and the rest of the graph.

    An ``index`` is that of a score: of the row in question, whatever its key.
    """

    spec: Graph
    att: Attention
    reader: Reader

    @property
    def lowest(self) -> Expr:
        """The largest score of no scores."""
        return identity(self.spec.nodes[self.att.top], F32)

    def larger(self, a: Expr, b: Expr) -> Expr:
        return combine(self.spec.nodes[self.att.top], a, b, F32)

    def _shifts(self, largest: Expr, index: Index) -> dict[int, Expr]:
        """What powers subtract, for a largest score."""
        found = {}
        for wide in self.att.spread:
            self.reader.overrides[self.att.top] = lambda _: largest
            node = self.spec.nodes[wide].inputs[0]
            found[wide] = self.reader.at(node, (*index[:-1], imm(0)))
            del self.reader.overrides[self.att.top]
        return found

    def power(self, masked: Expr, largest: Expr, index: Index) -> Expr:
        """Of a score, where ``largest`` is the row's."""
        reader, att = self.reader, self.att
        reader.overrides[att.masked] = lambda _: masked
        for wide, by in self._shifts(largest, index).items():
            reader.overrides[wide] = lambda _, by=by: by  # type: ignore[misc]
        found = reader.at(att.powers, index)
        for wide in (att.masked, *att.spread):
            del reader.overrides[wide]
        # Where nothing was seen yet the largest is no number to subtract.
        return T.Select(T.EQ(masked, self.lowest), ZERO, found)

    def shrunk(self, before: Expr, largest: Expr, index: Index) -> Expr:
        """What sums of powers are multiplied by when ``largest`` replaces ``before``."""
        shifts = self._shifts(before, index)
        old = next(iter(shifts.values())) if shifts else before
        # Of a row of which nothing was seen there is nothing to shrink.
        seen = self.power(old, largest, index)
        return T.Select(T.EQ(before, self.lowest), ZERO, seen)

    def divisor(self, whole: Expr, index: Index) -> Expr:
        """What sums are divided by, where ``whole`` is the sum of a row's powers."""
        att, reader = self.att, self.reader
        reader.overrides[att.total] = lambda _: whole
        found = reader.at(self.spec.nodes[att.divisor].inputs[0], (*index[:-1], imm(0)))
        del reader.overrides[att.total]
        return found

    def columns_follow(self, count: int) -> bool:
        """Whether the output has ``count`` neighbouring columns of the result next to each other,
        the first of which is a multiple of ``count``."""
        path = output_path(self.spec, self.att.out)
        head, query = (index_var(name) for name in ("head", "query"))
        batch = unlinear(head, self.spec.nodes[self.att.out].shape[:-2])
        return lie_together(self.spec, path, lambda n: (*batch, query, n), count)

    def written(self, out: Buffer, place: tuple[Expr, Expr, Expr], value: Expr) -> Stmt:
        """``value``, the result at (head, query, column), through the rest of the graph."""
        att, spec, reader = self.att, self.spec, self.reader
        path = output_path(spec, att.out)
        shape, batch = spec.nodes[path[-1]].shape, spec.nodes[att.out].shape[:-2]
        dtype = value_dtype(spec.nodes[att.out].dtype)
        head, query, column = place

        def emitted() -> list[Stmt]:
            reader.overrides[att.out] = lambda _: value.astype(dtype)
            index = along(spec, path, (*unlinear(head, batch), query, column))
            found = [store(out, linear(index, shape), reader.at(path[-1], index))]
            del reader.overrides[att.out]
            return found

        return reader.scope(emitted)


def inverse_of(divisor: Expr) -> tuple[Stmt, Expr]:
    """One over it, for half-precision results, which have half the digits that it loses."""
    inverse = T.Var("inverse", F32)
    return S.Bind(inverse, T.const(1, F32) / divisor), inverse
