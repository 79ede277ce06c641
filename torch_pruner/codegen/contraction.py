"""Emits matmul and convolution kernels: packed panels, register tiles, fused epilogues.

The nest is: parallel over groups, column panels and row chunks; row tiles; reduction; register
tile. The tile is ``tm`` rows by ``nv`` vectors, accumulated in local scope and written once through
the epilogue. Rows and columns that do not fill a tile are computed on clamped rows and zero-padded
columns and dropped at the store.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from torch_pruner.codegen._tvm import (
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
from torch_pruner.codegen.kernel import Emitted, parameters
from torch_pruner.codegen.operands import (
    Nest,
    a_at,
    b_at,
    pack_panel,
    pad_input,
    panel_fetcher,
    phase,
)
from torch_pruner.codegen.reader import Index, Reader, imm, linear, reshape_index, unlinear
from torch_pruner.codegen.values import store, value_dtype
from torch_pruner.graph.contraction import Contraction, contraction_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: Mapping[str, int], takes: Signature) -> Emitted:
    """TIR for a kernel graph with one contraction. Decisions: see ``tuner.sketch.contraction``."""
    con = contraction_of(spec)
    vl, tm, nv = decisions["vl"], decisions["tm"], decisions["nv"]
    inputs, (out,), scratch = parameters(takes)
    constant = next((k for k, p in enumerate(takes.packs) if p is not None), None)
    rest = list(scratch)
    padded = rest.pop() if con.conv is not None and con.conv.copies_input else None
    panel = inputs[constant] if constant is not None else (rest.pop() if rest else None)
    nest = Nest(
        spec,
        con,
        Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        vl,
        tm,
        nv,
        decisions["ku"],
        bool(decisions["par"]),
        bool(decisions["ahead"]) and constant is not None,
        panel,
        padded,
        buffer(tm * nv * vl, con.acc_dtype, "acc", scope="local"),
        out,
    )
    body = []
    if padded is not None:
        body.append(pad_input(nest))
    if constant is None and panel is not None:
        body.append(pack_panel(nest))
    body.append(_compute(nest, decisions["mc"], decisions["order"]))
    return Emitted(seq(body), inputs, [out], scratch)


def _compute(nest: Nest, chunks: int, order: int) -> Stmt:
    con = nest.con
    per_chunk = -(-nest.tiles // min(chunks, nest.tiles))
    chunks = -(-nest.tiles // per_chunk)  # none is empty: the guard below relies on it

    def task(p: Expr) -> Stmt:
        if order == 0:
            (g, nb, chunk) = unlinear(p, (con.groups, nest.blocks, chunks))
        else:
            (g, chunk, nb) = unlinear(p, (con.groups, chunks, nest.blocks))

        def tile(t: Expr) -> Stmt:
            at = chunk * per_chunk + t
            turn = (at, nest.tiles) if order == 0 else (t, per_chunk)
            body = _tile(nest, g, nb, at, turn)
            return body if nest.tiles % per_chunk == 0 else when(at < nest.tiles, body)

        return loop(per_chunk, tile, name="t")

    return loop(con.groups * nest.blocks * chunks, task, nest.kind, name="p")


def _row(nest: Nest, tile: Expr, i: Expr, *, clamp: bool) -> Index:
    """Indices of row ``i`` of a tile.

    When tiles fit the innermost row axis, neighbours differ by a constant.
    """
    m, tm = nest.con.m, nest.tm
    if m[-1] % tm == 0:
        inner = m[-1] // tm
        *outer, block = unlinear(tile, (*m[:-1], inner))
        return (*outer, block * tm + i)
    flat = tile * tm + i
    if clamp and nest.con.rows % tm:
        flat = T.min(flat, imm(nest.con.rows - 1))
    return unlinear(flat, m)


def _tile(nest: Nest, g: Expr, nb: Expr, tile: Expr, turn: tuple[Expr, int]) -> Stmt:
    """One register tile; ``turn`` is which of how many tiles of a panel it is."""
    con, vl, bn = nest.con, nest.vl, nest.bn
    zero = T.const(0, con.acc_dtype)

    def each(body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
        def row(i: Expr) -> Stmt:
            return loop(
                nest.nv, lambda j: loop(vl, lambda v: body(i, j, v), VECTORIZED, "v"), UNROLLED, "j"
            )

        return loop(nest.tm, row, UNROLLED, "i")

    def update(k: Index) -> Stmt:
        def step(i: Expr, j: Expr, v: Expr) -> Stmt:
            lane = j * vl + v
            at = i * bn + lane
            a = a_at(nest, g, _row(nest, tile, i, clamp=True), k, nb * bn + lane).astype(
                con.acc_dtype
            )
            b = b_at(nest, g, nb, k, nb * bn + lane, lane).astype(con.acc_dtype)
            return store(nest.acc, at, nest.acc[at] + a * b)

        return each(step)

    def clear(buf: Buffer) -> Stmt:
        return each(lambda i, j, v: store(buf, i * bn + j * vl + v, zero))

    ahead = panel_fetcher(nest, g, nb, turn) if nest.ahead else None
    needed = _reads_input(nest, tile)
    level = _level(con)
    if level is None:
        products = [clear(nest.acc), _reduce(nest, update, ahead, needed)]
        return seq([stack(nest.acc), *products, _write(nest, g, nb, tile)])
    total = buffer(nest.tm * bn, con.acc_dtype, "total", scope="local")

    def add(i: Expr, j: Expr, v: Expr) -> Stmt:
        at = i * bn + j * vl + v
        return store(total, at, total[at] + nest.acc[at])

    def part(body: Stmt) -> Stmt:
        return seq([clear(nest.acc), body, each(add)])

    products = [clear(total), _reduce(nest, update, ahead, needed, level, part)]
    whole = each(lambda i, j, v: store(nest.acc, i * bn + j * vl + v, total[i * bn + j * vl + v]))
    return seq([stack(nest.acc), stack(total), *products, whole, _write(nest, g, nb, tile)])


_LONG, _PART = 1024, 256


def _level(con: Contraction) -> int | None:
    """How many reduction axes to pass before sums are begun anew; None for short reductions.

    A sum of thousands of products in one go loses digits: each is rounded like the whole. Sums of
    some hundreds, added up, lose a fraction of that, and cost a percent.
    """
    if con.depth <= _LONG or con.acc_dtype != "float32":
        return None
    inner = [math.prod(con.k[i:]) for i in range(1, len(con.k))]
    return max((i for i, n in enumerate(inner, 1) if n >= _PART), default=0)


def _reads_input(nest: Nest, tile: Expr) -> Callable[[Index], Expr | None]:
    """Whether the kernel offsets chosen so far read anything but padding; None if they always do.

    Known for tiles that lie in one line of the output: most of a strongly dilated convolution, and
    the first and last line of any padded one, multiplies zeros.
    """
    con, conv, tm = nest.con, nest.con.conv, nest.tm
    if conv is None or con.form != "conv" or con.m[-1] % tm:
        return lambda _: None
    place = _row(nest, tile, imm(0), clamp=True)[1:]
    extent = nest.spec.nodes[con.a].shape[2:]

    def guard(offsets: Index) -> Expr | None:
        d = len(offsets) - 1
        hop, gap, lo, size = conv.stride[d], conv.dilation[d], conv.lo[d], extent[d]
        span = (tm - 1) * hop if d == len(place) - 1 else 0
        highest = (con.m[d + 1] - 1) * hop - span + (conv.kernel[d] - 1) * gap - lo
        first = place[d] * hop + offsets[d] * gap - lo
        inside = [first + span >= 0] if lo > span else []
        inside += [first < size] if highest >= size else []
        return T.all(*inside) if inside else None

    return guard


def _reduce(
    nest: Nest,
    update: Callable[[Index], Stmt],
    ahead: Callable[[Expr], Stmt] | None,
    needed: Callable[[Index], Expr | None],
    level: int | None = None,
    part: Callable[[Stmt], Stmt] = lambda body: body,
) -> Stmt:
    """Loops over the reduction axes; the innermost is unrolled by ``ku`` with a remainder.

    ``part`` wraps what is below ``level`` axes; below none, pieces of the innermost.
    """
    *outer, last = nest.con.k
    ku = min(nest.ku, last)

    def inner(prefix: Index) -> Stmt:
        def block(first: Expr, count: int) -> Stmt:
            return loop(count, lambda u: update((*prefix, first + u)), UNROLLED, "u")

        def step(ko: Expr) -> Stmt:
            if ahead is None:
                return block(ko * ku, ku)
            return seq([ahead(linear((*prefix, ko), (*outer, last // ku))), block(ko * ku, ku)])

        steps, done = last // ku, last - last % ku
        rest = block(imm(done), last % ku) if last % ku else None
        if level != 0:
            return seq([loop(steps, step, name="k") if done else None, rest])
        each = max(1, _PART // ku)
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
            body, condition = nested((*prefix, r), rest[1:]), needed((*prefix, r))
            body = part(body) if len(prefix) + 1 == level else body
            return body if condition is None else when(condition, body)

        return loop(rest[0], offset, name="r")

    return nested((), tuple(outer))


def _write(nest: Nest, g: Expr, nb: Expr, tile: Expr) -> Stmt:
    """The epilogue: every element of the tile through the rest of the graph, stored once."""
    con, vl, bn = nest.con, nest.vl, nest.bn
    path = output_path(nest.spec, con.anchor)
    shape = nest.spec.nodes[path[-1]].shape
    ragged = bool(con.rows % nest.tm and con.m[-1] % nest.tm)

    def row(i: Expr) -> Stmt:
        place = _row(nest, tile, i, clamp=False)

        def vector(j: Expr) -> Stmt:
            first = nb * bn + j * vl

            def element(v: Expr) -> Stmt:
                index = along(nest.spec, path, anchor_index(con, g, place, first + v))
                _read_tile(nest, i * bn + j * vl + v)
                return nest.reader.scope(
                    lambda: [store(nest.out, linear(index, shape), nest.reader.at(path[-1], index))]
                )

            whole = loop(vl, element, VECTORIZED, "v")
            if con.n % bn == 0:
                return whole
            single = loop(vl, lambda v: when(first + v < con.n, element(v)), name="v")
            return when(first + vl <= con.n, whole, single)

        vectors = loop(nest.nv, vector, UNROLLED, "j")
        return when(tile * nest.tm + i < con.rows, vectors) if ragged else vectors

    return loop(nest.tm, row, UNROLLED, "i")


def _read_tile(nest: Nest, at: Expr) -> None:
    """Let the epilogue read the contraction's result from element ``at`` of the register tile."""
    dtype = value_dtype(nest.spec.nodes[nest.con.anchor].dtype)
    nest.reader.overrides[nest.con.anchor] = lambda _: nest.acc[at].astype(dtype)


def anchor_index(con: Contraction, g: Expr, row: Index, column: Expr) -> Index:
    """Index of the contraction's own output."""
    if con.conv is None:
        return (*unlinear(g, con.batch), *row, column)
    image, *place = row
    if con.form == "conv_phases":
        rows = zip(place, con.batch, phase(con, g), strict=True)
        return (image, column, *(q * s + first for q, s, (_, first) in rows))
    channel = column if con.groups == 1 else g * con.n + column
    return (image, channel, *place)


def output_path(spec: Graph, anchor: int) -> tuple[int, ...]:
    """Positions from the anchor to the output, each reading the one before."""
    reach = {anchor}
    for i, node in enumerate(spec.nodes):
        if any(j in reach for j in node.inputs):
            reach.add(i)
    path = [spec.outputs[0]]
    while path[-1] != anchor:
        path.append(next(i for i in spec.nodes[path[-1]].inputs if i in reach))
    return tuple(reversed(path))


def along(spec: Graph, path: tuple[int, ...], index: Index) -> Index:
    """Carry an index of ``path[0]`` to ``path[-1]`` through bijective views and pointwise nodes."""
    for before, after in itertools.pairwise(path):
        node, source = spec.nodes[after], spec.nodes[before]
        if node.op == "reshape":
            index = reshape_index(index, source.shape, node.shape)
        elif node.op == "permute":
            index = tuple(index[p] for p in node.attr("perm"))
    return index
