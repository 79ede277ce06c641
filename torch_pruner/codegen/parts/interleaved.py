"""A padded copy, channels last, of an image that lies channels first: vectors along its lines.

Few channels make no vector. A vector of each channel is read, and shuffles deal their numbers out
to as many vectors of the copy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    enclosed,
    imm,
    loop,
    seq,
    stack,
    vector,
    when,
)
from torch_pruner.codegen.tir.reader import linear, unlinear
from torch_pruner.codegen.tir.values import element_dtype, load, store, value_dtype
from torch_pruner.graph.adjacency import rows_together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.codegen.parts.operands import Nest

_CHANNELS = 8  # shuffles grow with their square


def interleaves(nest: Nest) -> bool:
    """Whether the first operand of a convolution can be copied so."""
    con, conv = nest.con, nest.con.conv
    assert conv is not None
    channels = nest.spec.nodes[con.a].shape[1]
    return (
        1 < channels <= _CHANNELS
        and conv.lo[-1] >= 0
        and _width(nest) >= nest.vl > 1
        and all(d == 1 for d in conv.dilate_input)
        and all(n is None for n in nest.counts)
        and rows_together(nest.spec, con)
    )


def _width(nest: Nest) -> int:
    """Columns of the input that the copy has: kernels in strides may not reach the last ones."""
    conv = nest.con.conv
    assert conv is not None
    return min(nest.spec.nodes[nest.con.a].shape[-1], conv.padded[-1] - conv.lo[-1])


def interleaved(nest: Nest) -> Stmt:
    """Copy the input with its padding."""
    con, conv, padded = nest.con, nest.con.conv, nest.copied
    assert conv is not None
    assert padded is not None
    images, channels, *rows, _ = nest.spec.nodes[con.a].shape
    width = _width(nest)
    *before, left = conv.lo
    lines = (images, *conv.padded[:-1])
    right = conv.padded[-1] - left - width

    def line(p: Expr) -> Stmt:
        image, *outer = unlinear(p, lines)
        start = linear((image, *outer, imm(0), imm(0)), (*lines, conv.padded[-1], channels))
        inside, source = [], []
        for q, lo, size in zip(outer, before, rows, strict=True):
            inside += [q - lo >= 0] if lo > 0 else []
            inside.append(q - lo < size)
            source.append(q - lo)
        whole = seq([
            _zeros(nest, start, left * channels),
            *_pieces(nest, (image, source), start + left * channels),
            _zeros(nest, start + (left + width) * channels, right * channels),
        ])  # fmt: skip
        nothing = _zeros(nest, start, conv.padded[-1] * channels)
        return when(T.all(*inside), whole, nothing) if inside else whole

    if math.prod(lines) == 1:  # one part, which threads may all do (``Family.copies_first``)
        return enclosed(line(imm(0)))
    return loop(math.prod(lines), line, nest.kind, name="line")


def _pieces(nest: Nest, where: tuple[Expr, Sequence[Expr]], start: Expr) -> list[Stmt]:
    """The numbers of a line, to ``start`` on; the last piece of a line begins earlier."""
    channels, width = nest.spec.nodes[nest.con.a].shape[1], _width(nest)
    vl, padded = nest.vl, nest.copied
    assert padded is not None
    dtype = value_dtype(element_dtype(padded))
    image, source = where

    def piece(at: Expr) -> Stmt:
        begin = T.min(at * vl, imm(width - vl)) if width % vl else at * vl
        taken, dealt = (
            buffer(channels * vl, dtype, name, scope="local") for name in ("taken", "dealt")
        )

        def lanes(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
            return loop(
                channels, lambda c: loop(vl, lambda v: body(c, v), VECTORIZED, "v"), UNROLLED, "c"
            )

        def take(c: Expr, v: Expr) -> Stmt:
            index = (image, c, *source, begin + v)
            return nest.reader.scope(
                lambda: [store(taken, c * vl + v, nest.reader.at(nest.con.a, index).astype(dtype))]
            )

        vectors = [taken[vector(imm(c * vl), vl)] for c in range(channels)]
        steps: list[Stmt] = []
        for k in range(channels):
            order = [e % channels * vl + e // channels for e in range(k * vl, (k + 1) * vl)]
            shuffled = T.Shuffle(vectors, [T.const(e, "int32") for e in order])
            steps.append(S.BufferStore(dealt, shuffled, [vector(imm(k * vl), vl)]))

        def leave(k: Expr, v: Expr) -> Stmt:
            return store(padded, start + begin * channels + k * vl + v, load(dealt, k * vl + v))

        return seq([stack(taken), stack(dealt), lanes(take), *steps, lanes(leave)])

    return [loop(-(-width // vl), piece, name="w")]


def _zeros(nest: Nest, start: Expr, count: int) -> Stmt | None:
    if not count:
        return None
    padded, vl = nest.copied, nest.vl
    assert padded is not None
    zero = T.const(0, value_dtype(element_dtype(padded)))

    def some(first: Expr, lanes: int) -> Stmt:
        kind = VECTORIZED if lanes == vl else UNROLLED
        return loop(lanes, lambda v: store(padded, start + first + v, zero), kind, "v")

    whole, rest = divmod(count, vl)
    parts = [loop(whole, lambda o: some(o * vl, vl), name="o")] if whole else []
    return seq([*parts, some(imm(whole * vl), rest)] if rest else parts)
