"""Emits matmul and convolution kernels: packed panels, register tiles, fused epilogues.

The nest is: parallel over groups, column panels and row chunks; row tiles; reduction; register
tile. The tile is ``tm`` rows by ``nv`` vectors, accumulated in local scope and written once through
the epilogue. The last panel has as many vectors as are left; columns that do not fill a vector are
computed on zeros. The last rows make a whole tile with rows before them. Neither is stored.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.copies import copy_first, pack_near, pack_panel, widen_block
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import Nest, panel_fetcher
from torch_pruner.codegen.parts.output import output_path
from torch_pruner.codegen.parts.row_tiles import (
    Rows,
    TilePosition,
    TileTraversal,
    first_rows,
    register_tile,
)
from torch_pruner.codegen.parts.runs import leading, rows_that_count, run_of
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    Expr,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    when,
    workspace,
)
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.families.contraction.counted_rows import Walk, count_rows, tiles, write_masked
from torch_pruner.families.contraction.form import LONG_SUM, PACKED_NEAR, SUM_PART
from torch_pruner.graph.contraction import contraction_of, copies_first, is_widened
from torch_pruner.graph.extents import axis_counts, unneeded, unwritten

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.contraction.form import ContractionDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: ContractionDecisions[int], signature: Signature) -> Emitted:
    """TIR for a kernel graph with one contraction."""
    con = contraction_of(spec)
    vl, tm, nv = decisions.vl, decisions.tm, decisions.nv
    inputs, (out,), scratch = parameters(signature)
    constant = next((k for k, p in enumerate(signature.packs) if p is not None), None)
    widened = bool(is_widened(spec, con, constant is not None, decisions))
    rest = list(scratch)
    sums = rest.pop() if decisions.kb > 1 else None
    copied = rest.pop() if copies_first(spec, con, widened) else None
    panel = inputs[constant] if constant is not None else (rest.pop() if rest else None)
    nest = Nest(
        spec,
        con,
        Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        vl,
        tm,
        nv,
        decisions.ku,
        bool(decisions.par),
        bool(decisions.ahead) and constant is not None,
        panel,
        copied,
        sums,
        out,
        decisions.kb,
        unwritten=unwritten(spec, output_path(spec, con.anchor)),
        unneeded=unneeded(spec)[con.anchor],
    )
    if con.form == "conv":
        count_rows(nest)
    if nest.compact:  # no tile has rows that are not needed
        axes = axis_counts(spec.nodes[con.anchor].shape, nest.unwritten | nest.unneeded).values()
        handled = {b[:2] for b in axes}
        nest.unwritten = frozenset(b for b in nest.unwritten if b[:2] not in handled)
        nest.unneeded = frozenset(b for b in nest.unneeded if b[:2] not in handled)
    if widened and constant is not None:
        nest.near = buffer(nest.block_depth * nest.bn, con.acc_dtype, "near")
    widen = None if nest.near is None else partial(widen_block, nest)
    if constant is None and decisions.pack == PACKED_NEAR:
        nest.near = buffer(nest.block_depth * nest.bn, con.acc_dtype, "near")
        widen = partial(pack_near, nest)
    body = []
    if copied is not None:
        body.append(copy_first(nest))
    if constant is None and panel is not None:
        body.append(pack_panel(nest))
    body.append(compute(nest, decisions.mc, decisions.order, widen))
    return Emitted(seq(body), inputs, [out], scratch)


def compute(
    nest: Nest,
    chunks: int,
    order: int,
    widen: Callable[[Expr, Expr, Expr], Stmt] | None = None,
) -> Stmt:
    """The loops over tasks and tiles; ``widen(group, panel, block)`` fills ``nest.near``."""
    con, near = nest.con, nest.near
    chunks, per_chunk = con.chunked(nest.tm, chunks)
    counted = None if nest.compact else _counted_tiles(nest)
    turns = bool(nest.unwritten or nest.unneeded) and not nest.compact and counted is None

    def task(p: Expr) -> Stmt:
        if order == 0:
            (g, nb, chunk) = unlinear(p, (con.groups, nest.blocks, chunks))
        elif con.shares_rows:
            (chunk, g, nb) = unlinear(p, (chunks, con.groups, nest.blocks))
        else:
            (g, chunk, nb) = unlinear(p, (con.groups, chunks, nest.blocks))

        # Of rows that are counted at run time each chunk has as many.
        each: Expr | int
        each = T.truncdiv(tiles(nest) + (chunks - 1), chunks) if nest.compact else per_chunk
        first = chunk * each
        if counted is not None:
            first, end = run_of(chunk, chunks, counted)
            each = end - first

        def panel(vectors: int) -> Stmt:
            walk = Walk.of(nest) if nest.compact else None
            traversal = _traversal(nest, walk)

            def tile(block: Expr, t: Expr) -> Stmt:
                at = t * chunks + chunk if turns else first + t
                turn = (at, nest.tiles) if order == 0 else (t, per_chunk)
                place = TilePosition(g, nb, vectors, block, at, turn, p * per_chunk + t)
                body = register_tile(nest, traversal, place)
                if nest.compact:
                    return when(at < tiles(nest), body)
                if counted is not None:
                    return body
                return body if nest.tiles % per_chunk == 0 else when(at < nest.tiles, body)

            def block_of(block: Expr) -> Stmt:
                begin = None if walk is None else walk.begin(first)
                passing = loop(each, lambda t: tile(block, t), name="t")
                return seq([None if widen is None else widen(g, nb, block), begin, passing])

            masked = write_masked(nest, g, nb, vectors, chunk, chunks)
            return seq([loop(nest.kb, block_of, name="kb"), masked])

        body = panel(nest.nv)
        if nest.last_vectors != nest.nv:
            body = when(nb < nest.blocks - 1, body, panel(nest.last_vectors))
        return body if near is None else workspace(near, body)

    return loop(con.groups * nest.blocks * chunks, task, nest.kind, name="p")


def _counted_tiles(nest: Nest) -> Expr | None:
    """Tiles that are not left out, where they are the first so many of a group; the conditions
    that say so are taken off ``nest``."""
    con = nest.con
    handled = leading(nest.unwritten, con.rows, con.n)
    if con.conv is not None or not handled:
        return None
    count = rows_that_count(nest.reader, handled, con.rows, con.n)
    nest.unwritten -= handled
    nest.unneeded -= handled
    return T.truncdiv(count + (nest.tm - 1), imm(nest.tm))


def _traversal(nest: Nest, walk: Walk | None) -> TileTraversal:
    """Neighbouring rows, of a ``walk`` where they are counted, and a pass over the reduction with
    the next panel fetched meanwhile."""
    level = _level(nest)

    def passing(
        place: TilePosition,
        rows: Rows,
        update: Callable[[Index], Stmt],
        part: Callable[[Stmt], Stmt] | None,
    ) -> Stmt:
        ahead = None
        if nest.ahead:
            ahead = panel_fetcher(nest, place.g, place.nb, place.kb, place.turn)
        needed = _reads_input(nest, rows)
        if part is None:
            return _reduce(nest, place.kb, update, ahead, needed)
        return _reduce(nest, place.kb, update, ahead, needed, level, part)

    rows = partial(_rows, nest) if walk is None else walk.rows
    return TileTraversal(rows, passing, level is not None)


def _rows(nest: Nest, tile: Expr) -> Rows:
    """Neighbouring rows lie a constant apart wherever the operator allows it.

    A last tile that is not full begins earlier; rows of the tile before are not its own.
    """
    con, m, tm = nest.con, nest.con.m, nest.tm
    if con.by_line(tm):
        width = m[-1]
        *outer, block = unlinear(tile, (*m[:-1], -(-width // tm)))
        own, bind, start = first_rows(block, tm, width)
        return Rows(lambda i: (*outer, start + i), own, bind)
    if con.in_line:
        own, bind, start = first_rows(tile, tm, con.rows)
        return Rows(lambda i: unlinear(start + i, m), own, bind)
    last = imm(con.rows - 1)
    if con.rows % tm == 0:
        return Rows(lambda i: unlinear(tile * tm + i, m))
    return Rows(lambda i: unlinear(T.min(tile * tm + i, last), m), lambda i: tile * tm + i <= last)


def _level(nest: Nest) -> int | None:
    """How many reduction axes of a block to pass before sums are begun anew; None for short ones.

    A sum of thousands of products in one go loses digits: each is rounded like the whole. Sums of
    some hundreds, added up, lose a fraction of that, and cost a percent.
    """
    k = nest.inner
    if math.prod(k) <= LONG_SUM or nest.con.acc_dtype != "float32":
        return None
    inner = [math.prod(k[i:]) for i in range(1, len(k))]
    return max((i for i, n in enumerate(inner, 1) if n >= SUM_PART), default=0)


def _reads_input(nest: Nest, rows: Rows) -> Callable[[Index], Expr | None]:
    """Whether the kernel offsets chosen so far read anything but padding; None if they always do.

    Known for tiles that lie in one line of the output: most of a strongly dilated convolution, and
    the first and last line of any padded one, multiplies zeros.
    """
    con, conv, tm = nest.con, nest.con.conv, nest.tm
    if conv is None or con.form != "conv" or nest.compact or not con.by_line(tm):
        return lambda _: None
    place = rows.at(imm(0))[1:]
    extent = nest.spec.nodes[con.a].shape[2:]

    def guard(offsets: Index) -> Expr | None:
        d = len(offsets) - 1
        stride, dilation, lo, size = conv.stride[d], conv.dilation[d], conv.lo[d], extent[d]
        span = (tm - 1) * stride if d == len(place) - 1 else 0
        highest = (con.m[d + 1] - 1) * stride - span + (conv.kernel[d] - 1) * dilation - lo
        first = place[d] * stride + offsets[d] * dilation - lo
        inside = [first + span >= 0] if lo > span else []
        inside += [first < size] if highest >= size else []
        return T.all(*inside) if inside else None

    return guard


def _reduce(
    nest: Nest,
    kb: Expr,
    update: Callable[[Index], Stmt],
    ahead: Callable[[Expr], Stmt] | None,
    needed: Callable[[Index], Expr | None],
    level: int | None = None,
    part: Callable[[Stmt], Stmt] = lambda body: body,
) -> Stmt:
    """Loops over the reduction axes of a block; the innermost is unrolled by ``ku``, with a rest.

    ``part`` wraps what is below ``level`` axes; below none, pieces of the innermost.
    """
    *outer, last = nest.inner
    ku = min(nest.ku, last)
    fixed: Index = ()
    origin = kb * last if nest.kb > 1 else imm(0)
    if len(nest.con.k) > 1:
        fixed = unlinear(kb, nest.con.k[: len(nest.con.k) - len(nest.inner)])
        origin = imm(0)

    def inner(prefix: Index) -> Stmt:
        def block(first: Expr, count: int) -> Stmt:
            def at(u: Expr) -> Stmt:
                return update((*fixed, *prefix, origin + first + u))

            return loop(count, at, UNROLLED, "u")

        def step(ko: Expr) -> Stmt:
            if ahead is None:
                return block(ko * ku, ku)
            return seq([ahead(linear((*prefix, ko), (*outer, last // ku))), block(ko * ku, ku)])

        steps, done = last // ku, last - last % ku
        rest = block(imm(done), last % ku) if last % ku else None
        if level != 0:
            return seq([loop(steps, step, name="k") if done else None, rest])
        each = max(1, SUM_PART // ku)
        whole = steps // each

        def piece(first: Expr, count: int) -> Stmt:
            return part(loop(count, lambda k: step(first + k), name="k"))

        parts = [loop(whole, lambda o: piece(o * each, each), name="part") if whole else None]
        parts.append(piece(imm(whole * each), steps % each) if steps % each else None)
        return seq([*parts, None if rest is None else part(rest)])

    def nested(prefix: Index, rest: tuple[int, ...]) -> Stmt:
        if not rest:
            return inner(prefix)

        def offset(r: Expr) -> Stmt:
            body = nested((*prefix, r), rest[1:])
            condition = needed((*fixed, *prefix, r))
            body = part(body) if len(prefix) + 1 == level else body
            return body if condition is None else when(condition, body)

        return loop(rest[0], offset, name="r")

    body = nested((), tuple(outer))
    for d in range(len(fixed)):
        condition = needed(fixed[: d + 1])
        body = body if condition is None else when(condition, body)
    return body
