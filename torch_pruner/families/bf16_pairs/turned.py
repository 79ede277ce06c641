"""The copy of a convolution's input channel by channel (see ``planes``)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.transposed import in_square, transposed
from torch_pruner.codegen.tir.builders import (
    VECTORIZED,
    Buffer,
    Expr,
    ForKind,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import imm, linear, unlinear
from torch_pruner.codegen.tir.values import load, store, value_dtype
from torch_pruner.families.bf16_pairs.form import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.tir.reader import Index
    from torch_pruner.families.bf16_pairs.nest import PairNest


def turn(nest: PairNest, kind: ForKind) -> Stmt:
    """The copy as a loop of ``kind`` over blocks of channels, images and phases."""
    planes, channels = nest.form.planes, nest.con.m[0]
    assert planes is not None
    rows = min(COLUMNS, channels)
    axes = (-(-channels // rows), planes.images, *planes.phases[:-1])
    filled = planes.images * math.prod(planes.extent)

    def unit(p: Expr) -> Stmt:
        block, image, *phase = unlinear(p, axes)
        first = T.min(block * rows, imm(channels - rows)) if channels % rows else block * rows
        parts: list[Stmt | None] = []
        for last in range(planes.phases[-1]):
            whole = (*phase, imm(last))
            start = [
                (first + c) * planes.row + linear(whole, planes.phases) * planes.length
                for c in map(imm, range(rows))
            ]

            def line(at: Expr, whole: Index = whole, last: int = last) -> Stmt:
                return _line(nest, first, rows, image, whole, last, at)

            parts.append(loop(math.prod(planes.extent[:-1]), line, name="line"))
            if planes.length > filled:
                ends = [_blank(nest, s + filled, planes.length - filled) for s in start]
                parts.append(when(image == planes.images - 1, seq(ends)))
        return seq(parts)

    return loop(math.prod(axes), unit, kind, name="p")


def _line(
    nest: PairNest, first: Expr, rows: int, image: Expr, phase: Index, last: int, number: Expr
) -> Stmt:
    """One line of ``rows`` channels from ``first`` on, ``last`` the innermost dimension's phase.

    It is turned by squares of vectors, the last of which begins earlier, where it is that long.
    """
    con, conv, planes = nest.con, nest.con.conv, nest.form.planes
    assert conv is not None
    assert planes is not None
    extents = nest.spec.nodes[con.a].shape[2:]
    width = planes.extent[-1]
    place = unlinear(number, planes.extent[:-1])
    base = image * math.prod(planes.extent) + linear((*place, imm(0)), planes.extent)
    inside, at = [], []
    for d, y in enumerate(place):
        where = y * conv.dilation[d] + phase[d] * planes.apart[d] - conv.lo[d]
        inside += [where >= 0, where < extents[d]]
        at.append(where)
    apart, shift = conv.dilation[-1], last * planes.apart[-1] - conv.lo[-1]
    low = max(0, -(shift // apart))  # the first position of the plane that is one of the input
    high = max(low, min(width, (extents[-1] - 1 - shift) // apart + 1))
    count = high - low

    def address(c: Expr, x: Expr) -> Expr:
        return (first + c) * planes.row + linear(phase, planes.phases) * planes.length + base + x

    def value(c: Expr, x: Expr) -> Expr:
        return nest.reader.at(con.a, (first + c, image, *at, (x + low) * apart + shift))

    def place_of(c: Expr, x: Expr) -> tuple[Buffer, Expr]:
        assert nest.copy is not None
        return nest.copy, address(c, x + low)

    def square(o: Expr) -> Stmt:
        x = T.min(o * COLUMNS, imm(count - COLUMNS)) if count % COLUMNS else o * COLUMNS
        return in_square(
            nest, "bfloat16", lambda i, v: value(v, x + i), lambda i, v: place_of(i, x + v)
        )

    def alone(c: Expr) -> Stmt:
        def position(x: Expr) -> Stmt:
            target, where = place_of(c, x)
            return nest.reader.scope(lambda: [store(target, where, value(c, x))])

        return loop(count, position, name="x")

    def border(c: Expr) -> Stmt:
        start = address(c, imm(0))
        return seq([_blank(nest, start, low), _blank(nest, start + high, width - high)])

    nothing = loop(rows, lambda c: seq([_blank(nest, address(c, imm(0)), width)]), name="c")
    if not count:
        return nothing
    if rows == COLUMNS and width <= COLUMNS:
        body = _short(nest, (low, high), width, lambda c, x: value(c, x - low), address)
    elif rows == COLUMNS and count >= COLUMNS:
        body = loop(-(-count // COLUMNS), square, name="x")
    else:
        body = loop(rows, alone, name="c")
    if count < width and not (rows == COLUMNS and width <= COLUMNS):
        body = seq([body, loop(rows, border, name="c")])
    return when(T.all(*inside), body, nothing) if inside else body


def _short(
    nest: PairNest,
    inside: tuple[int, int],
    width: int,
    value: Callable[[Expr, Expr], Expr],
    address: Callable[[Expr, Expr], Expr],
) -> Stmt:
    """A line of at most 16 positions as a square, zeros but from ``inside[0]`` to ``inside[1]``."""
    squares = [buffer(COLUMNS * COLUMNS, "bfloat16", n, scope="local") for n in ("square", "other")]
    steps, whole = transposed(squares[0], squares[1], COLUMNS)
    copy = nest.copy
    assert copy is not None

    def vector(x: int) -> Stmt:
        def lane(v: Expr) -> Stmt:
            real = inside[0] <= x < inside[1]
            number = value(v, imm(x)) if real else T.const(0, value_dtype("bfloat16"))
            return store(squares[0], imm(x * COLUMNS) + v, number)

        return nest.reader.scope(lambda: [loop(COLUMNS, lane, VECTORIZED, "v")])

    def row(c: int) -> Stmt:
        def lane(v: Expr) -> Stmt:
            return store(copy, address(imm(c), v), load(whole, imm(c * COLUMNS) + v))

        return loop(width, lane, VECTORIZED, "v")

    taken, left = ([f(n) for n in range(COLUMNS)] for f in (vector, row))
    return seq([*(stack(s) for s in squares), *taken, *steps, *left])


def _blank(nest: PairNest, first: Expr, count: int) -> Stmt | None:
    if not count:
        return None
    zero = T.const(0, value_dtype("bfloat16"))
    assert nest.copy is not None
    copy = nest.copy
    return loop(count, lambda x: store(copy, first + x, zero), name="z")
