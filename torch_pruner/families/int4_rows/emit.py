"""Emits products of few rows with weights of four bits: a stream of words, widened in registers.

A parallel task takes a panel of columns and passes over its words once. Each vector of words gives
eight vectors of weights, and each of those is used for all rows. The sums of a group are scaled and
added up (``early=0``), or weights are scaled before they are used, which pays with more rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.copies import copy_first
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.nibbles import Nibbles
from torch_pruner.codegen.parts.operands import Nest, a_at
from torch_pruner.codegen.parts.row_tiles import Rows, TilePosition, write_tile
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    stack,
    vector,
    when,
)
from torch_pruner.codegen.tir.reader import Reader, imm, unlinear
from torch_pruner.families.int4_rows.digit_sums import sums_of, within
from torch_pruner.families.int4_rows.digits import FixedPoint
from torch_pruner.families.int4_rows.form import Int4Product, int4_product
from torch_pruner.graph.nibbles import DIGITS, IN_MANTISSA

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_pruner.families.int4_rows.form import Int4RowsDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: Int4RowsDecisions[int], signature: Signature) -> Emitted:
    """TIR for a product of few rows."""
    found = int4_product(spec)
    assert found is not None
    inputs, (out,), scratch = parameters(signature)
    digits = decisions.table == DIGITS
    nest = Nest(
        spec,
        found.con,
        Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        decisions.vl,
        tm=found.con.rows,
        nv=decisions.nv,
        ku=1,
        parallel=bool(decisions.par),
        ahead=False,
        panel=None,
        copied=scratch[0] if scratch and not digits else None,
        sums=None,
        out=out,
    )
    way = IN_MANTISSA if digits else decisions.table
    weights = nibbles_of(nest, found, dict(enumerate(inputs)), way)
    fixed = FixedPoint(nest, weights, scratch[0]) if digits else None
    work = _Rows(nest, weights, decisions, fixed)
    tasks = loop(nest.blocks, work.task, nest.kind, name="p")
    if fixed is not None:
        made = fixed.make(lambda m, k: work.element(m, k))
        return Emitted(within(fixed, seq([made, tasks])), inputs, [out], scratch)
    copied = copy_first(nest) if scratch else None
    return Emitted(weights.within(seq([copied, tasks])), inputs, [out], scratch)


def nibbles_of(nest: Nest, found: Int4Product, inputs: Mapping[int, Buffer], way: int) -> Nibbles:
    """The weights of a product among its inputs; ``way``: of ``codegen.parts.nibbles``."""
    words, scales, *offsets = (inputs[index] for index, _ in found.operands)
    return Nibbles(
        nest, found.bits, found.group, words, scales, offsets[0] if offsets else None, way
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a task does."""

    nest: Nest
    weights: Nibbles
    decisions: Int4RowsDecisions[int]
    fixed: FixedPoint | None = None

    def element(self, m: Expr, k: Expr) -> Expr:
        """An element of the first operand, as float32."""
        index = unlinear(m, self.nest.con.m)
        return a_at(self.nest, imm(0), index, (k,), imm(0)).astype("float32")

    def task(self, nb: Expr) -> Stmt:
        nest = self.nest
        whole = self._panel(nb, nest.nv)
        if nest.last_vectors == nest.nv:
            return whole
        return when(nb < nest.blocks - 1, whole, self._panel(nb, nest.last_vectors))

    def _panel(self, nb: Expr, vectors: int) -> Stmt:
        nest, weights, early = self.nest, self.weights, bool(self.decisions.early)
        # Indices are constants once loops are unrolled: LLVM keeps these in registers.
        size = nest.tm * nest.bn
        acc = buffer(self.decisions.split * size, "float32", "acc", scope="local")
        total = buffer(size, "float32", "total", scope="local")
        sums = _Sums(nest, vectors, self.decisions.split, acc, total)

        def words(first: Expr, count: int, rest: int) -> Stmt:
            """Whole words of a group from a row on, and so many numbers of one more."""
            parts = []
            if count:
                parts.append(loop(count, lambda r: self._word(sums, nb, first + r), name="k"))
            if rest:
                parts.append(self._word(sums, nb, first + count, rest))
            return seq(parts)

        def group(g: Expr, depth: int) -> Stmt:
            body = words(g * (weights.group // weights.per_word), *divmod(depth, weights.per_word))
            if early:
                return body
            scaled = sums.fold(lambda j: weights.scale(nb, g, j))
            return seq([sums.clear(), body, scaled])

        whole, rest = divmod(nest.con.depth, weights.group)
        groups = [
            loop(whole, lambda g: group(g, weights.group), name="g") if whole else None,
            group(imm(whole), rest) if rest else None,
        ]
        if self.fixed is not None:
            products = sums_of(self.fixed, vectors, total).added(nb, self.decisions.ahead)
            groups = [when(self.fixed.usable(), products, seq(groups))]
        place = TilePosition(imm(0), nb, vectors, imm(0), imm(0), (imm(0), 1), imm(0))
        rows = Rows(lambda i: unlinear(i, nest.con.m))
        return seq(
            [
                stack(acc),
                stack(total),
                sums.begin(),
                sums.clear() if early else None,
                *groups,
                sums.fold(None) if early else None,
                write_tile(nest, place, rows, total),
            ]
        )

    def _word(self, sums: _Sums, nb: Expr, row: Expr, count: int | None = None) -> Stmt:
        """Products with ``count`` numbers, or all, of the words of a row."""
        nest, weights = self.nest, self.weights
        read = weights.weight if self.decisions.early else weights.level

        def number(i: Expr) -> Stmt:
            def add(m: Expr, j: Expr) -> Stmt:
                x = self.element(m, row * weights.per_word + i)
                product = read(nb, row, i, j) * T.Broadcast(x, nest.vl)
                at = sums.at(T.floormod(i, self.decisions.split), m, j)
                return S.BufferStore(sums.acc, sums.acc[at] + product, [at])

            return sums.each(add)

        fetch = weights.fetch(nb, row, self.decisions.ahead)
        return seq([fetch, loop(count or weights.per_word, number, UNROLLED, "i")])


@dataclass(frozen=True, slots=True)
class _Sums:
    """The sums of a panel: ``split`` of a group for each element, and the total."""

    nest: Nest
    vectors: int
    split: int
    acc: Buffer
    total: Buffer

    def at(self, part: Expr, m: Expr, j: Expr) -> Expr:
        """The index of a vector of ``acc``."""
        nest = self.nest
        return vector((part * nest.tm + m) * nest.bn + j * nest.vl, nest.vl)

    def each(self, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """``body`` of every row and vector."""

        def row(m: Expr) -> Stmt:
            return loop(self.vectors, lambda j: body(m, j), UNROLLED, "j")

        return loop(self.nest.tm, row, UNROLLED, "m")

    @property
    def _zero(self) -> Expr:
        return T.Broadcast(T.const(0, "float32"), self.nest.vl)

    def begin(self) -> Stmt:
        """Totals are zero."""
        return self.each(
            lambda m, j: S.BufferStore(self.total, self._zero, [self.at(imm(0), m, j)])
        )

    def clear(self) -> Stmt:
        """Sums are zero."""

        def part(s: Expr) -> Stmt:
            return self.each(lambda m, j: S.BufferStore(self.acc, self._zero, [self.at(s, m, j)]))

        return loop(self.split, part, UNROLLED, "s")

    def fold(self, scale: Callable[[Expr], Expr] | None) -> Stmt:
        """Sums, times a scale for each vector, are added to the totals."""

        def add(m: Expr, j: Expr) -> Stmt:
            value = self.acc[self.at(imm(0), m, j)]
            for s in range(1, self.split):
                value = value + self.acc[self.at(imm(s), m, j)]
            at = self.at(imm(0), m, j)
            scaled = value if scale is None else value * scale(j)
            return S.BufferStore(self.total, self.total[at] + scaled, [at])

        return self.each(add)
