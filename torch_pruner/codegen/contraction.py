"""Emits matmul and convolution kernels: packed panels, register tiles, fused epilogues.

The nest is: parallel over groups, column panels and row chunks; row tiles; reduction; register
tile. The tile is ``tm`` rows by ``nv`` vectors, accumulated in local scope and written once through
the epilogue. Rows and columns that do not fill a tile are computed on clamped rows and zero-padded
columns and dropped at the store.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen._tvm import (
    PARALLEL,
    SERIAL,
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
from torch_pruner.codegen.reader import Index, Reader, imm, linear, reshape_index, unlinear
from torch_pruner.codegen.values import load, store, value_dtype
from torch_pruner.graph.contraction import Contraction, contraction_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


@dataclass(slots=True)
class _Nest:
    """Everything the parts of one emission share."""

    spec: Graph
    con: Contraction
    reader: Reader
    vl: int
    tm: int
    nv: int
    ku: int
    parallel: bool
    panel: Buffer | None  # packed second operand (given or made in the kernel)
    padded: Buffer | None
    # The register tile; indices are constants once loops are unrolled: LLVM keeps it in registers.
    acc: Buffer
    out: Buffer

    @property
    def bn(self) -> int:
        return self.vl * self.nv

    @property
    def blocks(self) -> int:
        return -(-self.con.n // self.bn)

    @property
    def tiles(self) -> int:
        return -(-self.con.rows // self.tm)


def emit(spec: Graph, decisions: Mapping[str, int], takes: Signature) -> Emitted:
    """TIR for a kernel graph with one contraction. Decisions: see ``tuner.sketch.contraction``."""
    con = contraction_of(spec)
    vl, tm, nv = decisions["vl"], decisions["tm"], decisions["nv"]
    inputs, (out,), scratch = parameters(takes)
    constant = next((k for k, p in enumerate(takes.packs) if p is not None), None)
    rest = list(scratch)
    padded = rest.pop() if con.conv is not None and con.conv.copies_input else None
    panel = inputs[constant] if constant is not None else (rest.pop() if rest else None)
    nest = _Nest(
        spec,
        con,
        Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        vl,
        tm,
        nv,
        decisions["ku"],
        bool(decisions["par"]),
        panel,
        padded,
        buffer(tm * nv * vl, con.acc_dtype, "acc", scope="local"),
        out,
    )
    body = []
    if padded is not None:
        body.append(_pad_input(nest))
    if constant is None and panel is not None:
        body.append(_pack_panel(nest))
    body.append(_compute(nest, decisions["mc"], decisions["order"]))
    return Emitted(seq(body), inputs, [out], scratch)


def _kind(nest: _Nest) -> object:
    return PARALLEL if nest.parallel else SERIAL


def _compute(nest: _Nest, chunks: int, order: int) -> Stmt:
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
            body = _tile(nest, g, nb, at)
            return body if nest.tiles % per_chunk == 0 else when(at < nest.tiles, body)

        return loop(per_chunk, tile, name="t")

    return loop(con.groups * nest.blocks * chunks, task, _kind(nest), name="p")


def _row(nest: _Nest, tile: Expr, i: Expr, *, clamp: bool) -> Index:
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


def _tile(nest: _Nest, g: Expr, nb: Expr, tile: Expr) -> Stmt:
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
            a = _a(nest, g, _row(nest, tile, i, clamp=True), k, nb * bn + lane).astype(
                con.acc_dtype
            )
            b = _b(nest, g, nb, k, nb * bn + lane, lane).astype(con.acc_dtype)
            return store(nest.acc, at, nest.acc[at] + a * b)

        return each(step)

    init = each(lambda i, j, v: store(nest.acc, i * bn + j * vl + v, zero))
    return seq([stack(nest.acc), init, _reduce(nest, update), _write(nest, g, nb, tile)])


def _reduce(nest: _Nest, update: Callable[[Index], Stmt]) -> Stmt:
    """Loops over the reduction axes; the innermost is unrolled by ``ku`` with a remainder."""
    *outer, last = nest.con.k
    ku = min(nest.ku, last)

    def inner(prefix: Index) -> Stmt:
        def block(first: Expr, count: int) -> Stmt:
            return loop(count, lambda u: update((*prefix, first + u)), UNROLLED, "u")

        done = last - last % ku
        parts = [loop(last // ku, lambda ko: block(ko * ku, ku), name="k") if done else None]
        parts.append(block(imm(done), last % ku) if last % ku else None)
        return seq(parts)

    def nested(prefix: Index, rest: tuple[int, ...]) -> Stmt:
        if not rest:
            return inner(prefix)
        return loop(rest[0], lambda r: nested((*prefix, r), rest[1:]), name="r")

    return nested((), tuple(outer))


def _a(nest: _Nest, g: Expr, row: Index, k: Index, column: Expr) -> Expr:
    con, conv = nest.con, nest.con.conv
    if conv is None:
        return nest.reader.at(con.a, (*unlinear(g, con.batch), *row, *k))
    if con.form == "depthwise":
        channel, offsets = T.min(column, imm(con.n - 1)) if con.n % nest.bn else column, k
    else:
        channel, offsets = g * con.k[-1] + k[-1], k[:-1]
    image, *place = row
    at = tuple(
        o * s + r * d for o, s, r, d in zip(place, conv.stride, offsets, conv.dilation, strict=True)
    )
    if nest.padded is None:
        return nest.reader.at(con.a, (image, channel, *at))
    channels = nest.spec.nodes[con.a].shape[1]
    return load(nest.padded, linear((image, *at, channel), (con.m[0], *conv.padded, channels)))


def _b(nest: _Nest, g: Expr, nb: Expr, k: Index, column: Expr, lane: Expr) -> Expr:
    con = nest.con
    if nest.panel is not None:
        base = (g * nest.blocks + nb) * con.depth + linear(k, con.k)
        return load(nest.panel, base * nest.bn + lane)
    return _operand(nest, g, k, column)


def _operand(nest: _Nest, g: Expr, k: Index, column: Expr) -> Expr:
    """The second operand where the graph has it (not packed)."""
    con = nest.con
    if con.conv is None:
        return nest.reader.at(con.b, (*unlinear(g, con.batch), *k, column))
    if con.form == "depthwise":
        return nest.reader.at(con.b, (column, imm(0), *k))
    *offsets, channel = k
    if con.form == "conv_transpose":
        flipped = tuple(r - 1 - o for o, r in zip(offsets, con.conv.kernel, strict=True))
        return nest.reader.at(con.b, (g * con.k[-1] + channel, column, *flipped))
    return nest.reader.at(con.b, (g * con.n + column, channel, *offsets))


def _pack_panel(nest: _Nest) -> Stmt:
    """Copy a second operand that is not constant into panels, once per call."""
    con, bn = nest.con, nest.bn
    panel = nest.panel
    assert panel is not None

    def block(p: Expr) -> Stmt:
        g, nb = unlinear(p, (con.groups, nest.blocks))

        def element(flat: Expr, v: Expr) -> Stmt:
            column = nb * bn + v
            value = _operand(nest, g, unlinear(flat, con.k), column)
            if con.n % bn:
                zero = T.const(0, value_dtype(nest.spec.nodes[con.b].dtype))
                value = T.if_then_else(column < con.n, value, zero)
            return store(panel, (p * con.depth + flat) * bn + v, value)

        return loop(
            bn, lambda v: loop(con.depth, lambda flat: element(flat, v), name="k"), name="v"
        )

    return loop(con.groups * nest.blocks, block, _kind(nest), name="p")


def _pad_input(nest: _Nest) -> Stmt:
    """Copy the input channels-last with its padding and the zeros between dilated elements."""
    con, conv, padded = nest.con, nest.con.conv, nest.padded
    assert conv is not None
    assert padded is not None
    x = nest.spec.nodes[con.a]
    images, channels, *extent = x.shape
    zero = T.const(0, value_dtype(x.dtype))
    shape = (images, *conv.padded, channels)
    lines = (images, *conv.padded[:-1])

    def line(p: Expr) -> Stmt:
        image, *outer = unlinear(p, lines)

        def point(w: Expr) -> Stmt:
            inside, source = [], []
            for q, lo, d, size in zip((*outer, w), conv.lo, conv.dilate_input, extent, strict=True):
                shifted = q - lo
                if lo > 0:
                    inside.append(shifted >= 0)
                inside.append(shifted < (size - 1) * d + 1)
                if d != 1:
                    inside.append(T.floormod(shifted, d) == 0)
                source.append(T.floordiv(shifted, d) if d != 1 else shifted)
            base = linear((image, *outer, w, imm(0)), shape)

            def copy(value: Callable[[Expr], Expr]) -> Stmt:
                return _channels(channels, nest.vl, lambda c: store(padded, base + c, value(c)))

            read = nest.reader.scope(
                lambda: [copy(lambda c: nest.reader.at(con.a, (image, c, *source)))]
            )
            return when(T.all(*inside), read, copy(lambda c: zero))

        return loop(conv.padded[-1], point, name="w")

    return loop(math.prod(lines), line, _kind(nest), name="line")


def _channels(count: int, vl: int, body: Callable[[Expr], Stmt]) -> Stmt:
    """Vectors over ``count`` elements and a scalar remainder."""
    parts = []
    whole = count // vl
    if whole:
        parts.append(
            loop(whole, lambda o: loop(vl, lambda v: body(o * vl + v), VECTORIZED, "v"), name="c")
        )
    if count % vl:
        parts.append(loop(count % vl, lambda v: body(whole * vl + v), name="c"))
    return seq(parts)


def _write(nest: _Nest, g: Expr, nb: Expr, tile: Expr) -> Stmt:
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


def _read_tile(nest: _Nest, at: Expr) -> None:
    """Let the epilogue read the contraction's result from element ``at`` of the register tile."""
    dtype = value_dtype(nest.spec.nodes[nest.con.anchor].dtype)
    nest.reader.overrides[nest.con.anchor] = lambda _: nest.acc[at].astype(dtype)


def anchor_index(con: Contraction, g: Expr, row: Index, column: Expr) -> Index:
    """Index of the contraction's own output."""
    if con.conv is None:
        return (*unlinear(g, con.batch), *row, column)
    image, *place = row
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
