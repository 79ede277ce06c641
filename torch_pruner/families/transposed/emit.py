"""Emits elementwise kernels that turn what they read across, square by square."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import around_lines
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.sweeps import blocked, store_outputs
from torch_pruner.codegen.parts.transposed import in_square
from torch_pruner.codegen.tir.builders import (
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
from torch_pruner.codegen.tir.reader import Index, Reader, held, imm, unlinear
from torch_pruner.codegen.tir.values import value_dtype
from torch_pruner.families.transposed.form import crossed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.transposed.form import TransposedDecisions
    from torch_pruner.graph.crossing import Crossing
    from torch_pruner.graph.ir import Graph, Shape
    from torch_pruner.graph.signature import Signature


@dataclass(frozen=True, slots=True)
class _Nest:
    """What all loops are made of."""

    spec: Graph
    reader: Reader  # of operands, where squares of them are taken
    outputs: Sequence[Buffer]
    crossing: Crossing
    shape: Shape  # of the outputs
    vl: int

    @property
    def rows(self) -> Shape:
        """The axes along which squares are below each other."""
        return self.shape[slice(*self.crossing.down)]

    @property
    def line(self) -> Shape:
        """The axes that lines of squares go along."""
        return self.shape[self.crossing.along :]

    @property
    def height(self) -> int:
        return math.prod(self.rows)

    @property
    def width(self) -> int:
        return math.prod(self.line)

    @property
    def lead(self) -> Shape:
        """The axes that squares do not lie in."""
        start, stop = self.crossing.down
        return (*self.shape[:start], *self.shape[stop : self.crossing.along])

    def index(self, lead: Index, row: Expr, position: Expr) -> Index:
        """Where the element at ``position`` of the line ``row`` is."""
        return self._index(lead, unlinear(row, self.rows), unlinear(position, self.line))

    def begin(self, lead: Index, row: Expr, position: Expr) -> Index:
        """An index that none of a square's lies in front of along any axis: rows and lines may
        cross those of the last of the axes that they go along."""
        rows, line = unlinear(row, self.rows), unlinear(position, self.line)
        return self._index(
            lead,
            (rows[0], *(imm(0) for _ in rows[1:])),
            (line[0], *(imm(0) for _ in line[1:])),
        )

    def _index(self, lead: Index, rows: Index, line: Index) -> Index:
        start = self.crossing.down[0]
        return (*lead[:start], *rows, *lead[start:], *line)


def emit(spec: Graph, decisions: TransposedDecisions[int], signature: Signature) -> Emitted:
    """TIR for an elementwise kernel."""
    inputs, outputs, scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    found = crossed(spec, decisions.vl)
    assert found is not None
    nest = _Nest(spec, reader, outputs, found, spec.nodes[spec.outputs[0]].shape, decisions.vl)
    around = around_lines(spec, reader)
    down, across = -(-nest.height // nest.vl), -(-nest.width // nest.vl)
    tile = min(decisions.tile, down)
    bands = -(-down // tile)

    def turn(p: Expr) -> Stmt:
        *lead, band, at = unlinear(p, (*nest.lead, bands, across))

        def square(t: Expr) -> Stmt:
            first = (band * tile + t) * nest.vl
            body = _square(nest, tuple(lead), first, at * nest.vl)
            if around is not None:
                body = around(nest.begin(tuple(lead), first, at * nest.vl), body)
            return body if down % tile == 0 else when(first < nest.height, body)

        return loop(tile, square, name="t")

    body = blocked(
        math.prod(nest.lead) * bands * across,
        max(1, decisions.chunk // tile),
        decisions.par,
        turn,
        turns=around is not None,
    )
    return Emitted(body, inputs, outputs, scratch)


def _square(nest: _Nest, lead: Index, row: Expr, position: Expr) -> Stmt:
    """The results of a square from its first element on.

    The last squares begin earlier than what is left: they read, but compute nothing again, which
    may have been written over what it was made of.
    """
    vl = nest.vl
    top = T.min(row, imm(nest.height - vl)) if nest.height % vl else row
    left = T.min(position, imm(nest.width - vl)) if nest.width % vl else position
    kept: dict[int, Buffer] = {}
    stmts: list[Stmt] = []
    for at in nest.crossing.nodes:
        dtype = value_dtype(nest.spec.nodes[at].dtype)
        turned = kept[at] = buffer(vl * vl, dtype, f"turned{at}", scope="local")

        def taken(i: Expr, v: Expr, at: int = at) -> Expr:
            return nest.reader.at(at, nest.index(lead, top + v, left + i))

        def place(i: Expr, v: Expr, turned: Buffer = turned) -> tuple[Buffer, Expr]:
            return turned, i * vl + v

        stmts += [stack(turned), in_square(nest, dtype, taken, place)]
    lines = _lines(nest, kept, lead, (top, left), (row, position))
    return seq([*stmts, lines])


def _lines(
    nest: _Nest,
    kept: dict[int, Buffer],
    lead: Index,
    begin: tuple[Expr, Expr],
    first: tuple[Expr, Expr],
) -> Stmt:
    """The results of a square whose operands begin at ``begin``, from ``first`` on."""
    vl, (top, left) = nest.vl, begin

    def element(i: Expr, v: Expr) -> Stmt:
        nodes = nest.spec.nodes
        overrides = {at: held(buf, i * vl + v, nodes[at].dtype) for at, buf in kept.items()}
        reader = Reader(nest.spec, nest.reader.buffers, overrides)
        return store_outputs(nest.spec, reader, nest.outputs, nest.index(lead, top + i, left + v))

    def line(i: Expr) -> Stmt:
        body = loop(vl, lambda v: element(i, v), VECTORIZED, "v")
        rest = nest.width % vl
        if rest:
            ragged = loop(rest, lambda v: element(i, imm(vl - rest) + v), name="v")
            body = when(first[1] <= nest.width - vl, body, ragged)
        return body if nest.height % vl == 0 else when(top + i >= first[0], body)

    return loop(vl, line, name="i")
