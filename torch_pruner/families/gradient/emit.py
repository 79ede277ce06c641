"""Emits gradients of convolutions' weights from operands that lie channels last.

A register tile is ``tm`` channels of the input at one tap by some vectors of the output's
channels; both are read where they lie, a position at a time, and borders are loops that end
earlier. Positions come in blocks of lines, so that what a block reads stays near while all tiles of
a task pass over it; between blocks a tile's sums wait in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import Nest
from torch_pruner.codegen.parts.row_tiles import (
    Rows,
    TilePosition,
    TileTraversal,
    first_rows,
    register_tile,
)
from torch_pruner.codegen.tir.builders import SERIAL, Expr, S, Stmt, T, index_var, loop, seq, when
from torch_pruner.codegen.tir.reader import Index, Reader, imm, unlinear
from torch_pruner.families.gradient.form import Gradient, gradient_of
from torch_pruner.graph.contraction import dealt

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.gradient.form import GradientDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: GradientDecisions[int], signature: Signature) -> Emitted:
    """TIR for the gradient of a convolution's weights."""
    found = gradient_of(spec)
    assert found is not None
    inputs, (out,), scratch = parameters(signature)
    nest = Nest(
        spec,
        found.con,
        Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        decisions.vl,
        decisions.tm,
        decisions.nv,
        1,
        bool(decisions.par),
        ahead=False,
        panel=None,
        copied=None,
        sums=scratch[0] if scratch else None,
        out=out,
        kb=found.lines // decisions.lb,
    )
    return Emitted(_tasks(nest, found, decisions.mc), inputs, [out], scratch)


def _tasks(nest: Nest, gradient: Gradient, chunks: int) -> Stmt:
    tiles, traversal = gradient.tiles(nest.tm), _traversal(nest, gradient)
    chunks, each = dealt(tiles, chunks)

    def task(p: Expr) -> Stmt:
        chunk, nb = unlinear(p, (chunks, nest.blocks))

        def panel(vectors: int) -> Stmt:
            def tile(kb: Expr, t: Expr) -> Stmt:
                at = chunk * each + t
                place = TilePosition(imm(0), nb, vectors, kb, at, (t, each), p * each + t)
                body = register_tile(nest, traversal, place)
                return body if tiles % each == 0 else when(at < tiles, body)

            def block(kb: Expr) -> Stmt:
                return loop(each, lambda t: tile(kb, t), name="t")

            return loop(nest.kb, block, name="kb")

        if nest.last_vectors == nest.nv:
            return panel(nest.nv)
        return when(nb < nest.blocks - 1, panel(nest.nv), panel(nest.last_vectors))

    return loop(chunks * nest.blocks, task, nest.kind, name="p")


def _traversal(nest: Nest, gradient: Gradient) -> TileTraversal:
    """Tiles of channels, tap after tap, and a pass over the lines of a block."""
    con, tm = nest.con, nest.tm
    pieces = (-(-gradient.channels // tm), *con.m[1:])

    def rows(tile: Expr) -> Rows:
        number, *tap = unlinear(tile, pieces)
        own, bind, start = first_rows(number, tm, gradient.channels)
        return Rows(lambda i: (start + i, *tap), own, bind)

    def passing(
        place: TilePosition, rows: Rows, update: Callable[[Index], Stmt], _: object
    ) -> Stmt:
        lines = gradient.lines // nest.kb
        tap = rows.at(imm(0))[1:]
        return loop(
            lines, lambda n: _line(nest, gradient, tap, place.kb * lines + n, update), name="line"
        )

    return TileTraversal(rows, passing)


def _line(
    nest: Nest, gradient: Gradient, tap: Index, line: Expr, update: Callable[[Index], Stmt]
) -> Stmt:
    """The positions of a line at which a tap reads inside of the input."""
    con = nest.con
    image, *outer, piece = unlinear(line, (con.k[-1], *con.k[:-2], gradient.pieces))
    inside = []
    for d, at in enumerate(outer):
        start, dilation, extent, (low, high) = _reach(nest, tap, d)
        if low:
            inside.append(start + at * dilation >= 0)
        if high:
            inside.append(start + at * dilation < extent)
    start, dilation, extent, (low, high) = _reach(nest, tap, len(outer))

    def position(w: Expr) -> Stmt:
        return update((*outer, w, image))

    width, cut = gradient.width, gradient.pieces > 1
    if not low and not high and not cut:
        body = loop(width, position, name="w")
    else:
        # Positions from the first that reads the input to the last one, of none to all of the line.
        first = T.max(imm(0), T.floordiv(dilation - 1 - start, imm(dilation))) if low else imm(0)
        end = T.floordiv(extent - 1 - start, imm(dilation)) + 1 if high else imm(width)
        begin, count, w = (index_var(name) for name in ("begin", "count", "w"))
        bound = T.min(end, imm(width)) if high else end
        if cut:
            first = T.max(first, piece * gradient.piece)
            bound = T.min(bound, (piece + 1) * gradient.piece)
        body = seq(
            [
                S.Bind(begin, first),
                S.Bind(count, T.max(bound - begin, imm(0))),
                S.For(w, begin, count, SERIAL, position(w)),
            ]
        )
    return when(T.all(*inside), body) if inside else body


def _reach(nest: Nest, tap: Index, d: int) -> tuple[Expr, int, int, tuple[bool, bool]]:
    """Along a dimension: where a tap's positions begin, their distance, the input's extent.

    And whether any of them lie before the input or past its end.
    """
    con, conv = nest.con, nest.con.conv
    assert conv is not None
    stride, dilation, lo = conv.stride[d], conv.dilation[d], conv.lo[d]
    extent = nest.spec.nodes[con.a].shape[2 + d]
    last = (con.m[1 + d] - 1) * stride + (con.k[d] - 1) * dilation - lo
    return tap[d] * stride - lo, dilation, extent, (lo > 0, last >= extent)
