"""Second operands that are no constants, packed into panels: words of two neighbours along k."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.operands import element, second_operand
from torch_pruner.codegen.parts.transposed import in_square, transposed
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Expr,
    ForKind,
    S,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    stack,
    vector,
    when,
    workspace,
)
from torch_pruner.codegen.tir.reader import imm, unlinear
from torch_pruner.codegen.tir.values import bits, held_bits, load, store
from torch_pruner.families.bf16_pairs.form import COLUMNS, LINES, is_half, pairs_together
from torch_pruner.graph.adjacency import kernels_together
from torch_pruner.graph.strided import strided

_HELD = 384  # weights of a column that are turned at a time

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.tir.reader import Index
    from torch_pruner.families.bf16_pairs.nest import PairNest
    from torch_pruner.graph.strided import Strided


def pack(nest: PairNest, g: Expr, nb: Expr) -> Stmt:
    """Pack one panel."""
    if nest.form.planes is not None:
        return _positions(nest, g, nb)
    if nest.form.way == LINES:
        return _lined(nest, g, nb)
    if (place := pairs_together(nest.spec, nest.con)) is not None:
        return _words(nest, g, nb, place)
    kernels = kernels_together(nest.spec, nest.con)
    if kernels == "columns apart":
        return _turned(nest, g, nb)
    left = nest.con.n % nest.block * math.prod(nest.con.k[:-1])
    if kernels == "columns beside" and (not left or left >= COLUMNS):  # a vector stays inside
        return _gathered(nest, g, nb)
    return _reduction(nest, g, nb)


def pack_all(nest: PairNest, kind: ForKind) -> Stmt:
    """Pack all panels in a loop of ``kind``."""

    def one(p: Expr) -> Stmt:
        g, nb = unlinear(p, (nest.con.groups, nest.blocks))
        return pack(nest, g, nb)

    return loop(nest.con.groups * nest.blocks, one, kind, name="p")


def _reduction(nest: PairNest, g: Expr, nb: Expr) -> Stmt:
    """The reduction in the order of its axes, zeros past its end."""
    depth = nest.con.depth

    def value(k: Expr, column: Expr) -> Expr:
        return _bits_at(nest, g, unlinear(k, nest.con.k), column)

    pairs = depth // 2
    parts = [
        loop(pairs, lambda p: _line(nest, g, nb, p, lambda c: _word(value, p * 2, c)), name="k")
        if pairs
        else None
    ]
    if depth % 2:
        parts.append(_line(nest, g, nb, imm(pairs), lambda c: value(imm(depth - 1), c)))
    parts.append(
        _nothing(nest, g, nb, imm(pairs + depth % 2), nest.form.depth // 2 - pairs - depth % 2)
    )
    return seq(parts)


def _words(nest: PairNest, g: Expr, nb: Expr, place: Strided) -> Stmt:
    """A product's operand whose pairs are words: squares of them are turned.

    The last square along the reduction begins earlier; columns past the last one repeat it, whose
    sums are not stored.
    """
    con, lanes = nest.con, COLUMNS
    source, pairs = nest.reader.buffers[place.source], con.depth // 2
    batch = unlinear(g, con.batch)

    def square(o: Expr) -> Stmt:
        first = o * lanes
        if pairs % lanes:
            first = T.min(first, imm(pairs - lanes))

        def vectors(j: Expr) -> Stmt:
            squares = [
                buffer(lanes * lanes, "int32", n, scope="local") for n in ("square", "other")
            ]
            steps, whole = transposed(squares[0], squares[1], lanes)

            def take(i: Expr) -> Stmt:
                column = nb * nest.block + j * lanes + i
                if con.n % nest.block:
                    column = T.min(column, imm(con.n - 1))
                at = element(place, (*batch, first * 2, column))
                words = T.reinterpret(f"int32x{lanes}", source[vector(at, 2 * lanes)])
                return S.BufferStore(squares[0], words, [vector(i * lanes, lanes)])

            def leave(i: Expr) -> Stmt:
                at = nest.panel_at(g, nb, first + i) + j * lanes
                words = whole[vector(i * lanes, lanes)]
                return S.BufferStore(nest.panel, words, [vector(at, lanes)])

            taken, left = (loop(lanes, f, UNROLLED, "i") for f in (take, leave))
            return seq([*(stack(s) for s in squares), taken, *steps, left])

        return loop(nest.block // lanes, vectors, name="j")

    rest = nest.form.depth // 2 - pairs
    return seq(
        [loop(-(-pairs // lanes), square, name="k"), _nothing(nest, g, nb, imm(pairs), rest)]
    )


def _lined(nest: PairNest, g: Expr, nb: Expr) -> Stmt:
    """Offsets along the last dimension together, with zeros behind them."""
    outer, (width, channels) = nest.con.k[:-2], nest.con.k[-2:]
    pairs, odd = divmod(width * channels, 2)
    each = nest.form.inner // 2

    def run(o: Expr) -> Stmt:
        def value(k: Expr, column: Expr) -> Expr:
            return _bits_at(nest, g, (*unlinear(o, outer), *unlinear(k, (width, channels))), column)

        def pair(p: Expr) -> Stmt:
            return _line(nest, g, nb, o * each + p, lambda c: _word(value, p * 2, c))

        def half(c: Expr) -> Expr:
            return value(imm(pairs * 2), c)

        return seq(
            [
                loop(pairs, pair, name="k"),
                _line(nest, g, nb, o * each + pairs, half) if odd else None,
                _nothing(nest, g, nb, o * each + pairs + odd, each - pairs - odd),
            ]
        )

    return loop(math.prod(outer), run, name="o")


def _turned(nest: PairNest, g: Expr, nb: Expr) -> Stmt:
    """A convolution's weights, of which each column has all channels and offsets in one piece.

    Some channels at a time are turned by squares of vectors, the last of which begins earlier, to
    where columns are neighbours; pairs are made of those.
    """
    con = nest.con
    *kernel, channels = con.k
    taps = math.prod(kernel)
    some, place = _at_a_time(channels, taps), strided(nest.spec, con.b)
    assert place is not None
    held = some * taps
    lines = buffer(held * COLUMNS, "bfloat16", "lines", scope="local")

    def vector(c: Expr, j: Expr) -> Stmt:
        first = nb * nest.block + j * COLUMNS

        def taken(i: Expr, v: Expr) -> Expr:
            column = first + i if con.n % nest.block == 0 else T.min(first + i, imm(con.n - 1))
            at = imm(place.offset) + column * place.strides[0] + c * held + v
            return load(nest.reader.buffers[place.source], at)

        def square(o: Expr) -> Stmt:
            at = T.min(o * COLUMNS, imm(held - COLUMNS)) if held % COLUMNS else o * COLUMNS
            return in_square(
                nest,
                "bfloat16",
                lambda i, v: taken(i, at + v),
                lambda i, v: (lines, (at + i) * COLUMNS + v),
            )

        def pairs(t: Expr) -> Stmt:
            def pair(p: Expr) -> Stmt:
                def lane(v: Expr) -> Stmt:
                    low, high = (
                        held_bits(lines, ((p * 2 + h) * taps + t) * COLUMNS + v) for h in (0, 1)
                    )
                    word = T.bitwise_or(low, T.shift_left(high, T.const(16, "uint32")))
                    at = nest.panel_at(g, nb, T.floordiv(t * channels + c * some, 2) + p)
                    return store(nest.panel, at + j * COLUMNS + v, word.astype("int32"))

                return loop(COLUMNS, lane, VECTORIZED, "v")

            return loop(some // 2, pair, name="p")

        return seq([loop(-(-held // COLUMNS), square, name="o"), loop(taps, pairs, name="t")])

    def chunk(c: Expr) -> Stmt:
        return loop(nest.block // COLUMNS, lambda j: vector(c, j), name="j")

    return workspace(lines, loop(channels // some, chunk, name="c"))


def _at_a_time(channels: int, taps: int) -> int:
    """An even number of channels, by which ``channels`` divide, of a few hundred weights."""
    fits = [n for n in range(2, channels + 1, 2) if channels % n == 0 and n * taps >= COLUMNS]
    return max([n for n in fits if n * taps <= _HELD], default=fits[0])


def _gathered(nest: PairNest, g: Expr, nb: Expr) -> Stmt:
    """A transposed convolution's weights: for each channel, columns with all of their offsets.

    Two channels become words, as they lie; a vector is gathered of those, an offset of each column.
    """
    con = nest.con
    *kernel, channels = con.k
    taps = math.prod(kernel)
    width, place = nest.block * taps, strided(nest.spec, con.b)
    assert place is not None
    words = buffer(width, "int32", "words", scope="local")

    def pair(p: Expr) -> Stmt:
        source = nest.reader.buffers[place.source]
        start = imm(place.offset) + nb * (nest.block * taps)
        # The last panel has fewer columns, and nothing is read behind the last of them.
        real = width if con.n % nest.block == 0 else T.min((con.n - nb * nest.block) * taps, width)

        def zipped(o: Expr) -> Stmt:
            first = o * COLUMNS
            if con.n % nest.block:
                first = T.min(first, real - COLUMNS)

            def lane(v: Expr) -> Stmt:
                low, high = (
                    bits(load(source, start + (p * 2 + h) * place.strides[0] + first + v))
                    for h in (0, 1)
                )
                word = T.bitwise_or(low, T.shift_left(high, T.const(16, "uint32")))
                return store(words, first + v, word.astype("int32"))

            return nest.reader.scope(lambda: [loop(COLUMNS, lane, VECTORIZED, "v")])

        def offset(t: Expr) -> Stmt:
            at = nest.panel_at(g, nb, T.floordiv(t * channels, 2) + p)

            def vector(j: Expr) -> Stmt:
                def lane(v: Expr) -> Stmt:
                    return store(
                        nest.panel,
                        at + j * COLUMNS + v,
                        words[(j * COLUMNS + v) * taps + (taps - 1 - t)],
                    )

                return loop(COLUMNS, lane, VECTORIZED, "v")

            return loop(nest.block // COLUMNS, vector, UNROLLED, name="j")

        return seq([loop(width // COLUMNS, zipped, name="o"), loop(taps, offset, name="t")])

    return workspace(words, loop(channels // 2, pair, name="p"))


def _positions(nest: PairNest, g: Expr, nb: Expr) -> Stmt:
    """Positions as planes have them (see ``planes``): zeros where they are in no line."""
    con, planes = nest.con, nest.form.planes
    assert planes is not None
    *outer, width = con.k[:-1]
    lines = planes.extent[-1] // 2  # pairs of a line
    whole, odd = divmod(width, 2)

    def line(p: Expr) -> Stmt:
        image, *place = unlinear(p, (planes.images, *planes.extent[:-1]))

        def value(x: Expr, column: Expr) -> Expr:
            return _bits_at(nest, g, (*place, x, image), column)

        def put(x: Expr, word: Callable[[Expr], Expr]) -> Stmt:
            return _line(nest, g, nb, p * lines + x, word)

        parts = [
            loop(whole, lambda x: put(x, lambda c: _word(value, x * 2, c)), name="x")
            if whole
            else None,
            put(imm(whole), lambda c: value(imm(width - 1), c)) if odd else None,
            _nothing(nest, g, nb, p * lines + whole + odd, lines - whole - odd),
        ]
        inside = [at < n for at, n, e in zip(place, outer, planes.extent, strict=False) if n < e]
        held = seq(parts)
        return (
            when(T.all(*inside), held, _nothing(nest, g, nb, p * lines, lines)) if inside else held
        )

    count = planes.images * math.prod(planes.extent[:-1])
    rest = nest.form.depth // 2 - count * lines
    return seq([loop(count, line, name="line"), _nothing(nest, g, nb, imm(count * lines), rest)])


def _bits_at(nest: PairNest, g: Expr, k: Index, column: Expr) -> Expr:
    """Bits of an element of the second operand, as uint32."""
    con = nest.con
    place = strided(nest.spec, con.b) if con.conv is None and is_half(nest.spec, con.b) else None
    if place is None:
        return bits(second_operand(nest, g, k, column))
    index = (*unlinear(g, con.batch), *k, column)
    return held_bits(nest.reader.buffers[place.source], element(place, index))


def _word(value: Callable[[Expr, Expr], Expr], k: Expr, column: Expr) -> Expr:
    high = T.shift_left(value(k + 1, column), T.const(16, "uint32"))
    return T.bitwise_or(value(k, column), high)


def _line(
    nest: PairNest, g: Expr, nb: Expr, pair: Expr, value: Callable[[Expr], Expr | None]
) -> Stmt:
    """All columns of a pair, by vectors; columns past the last one are zero."""
    n, block = nest.con.n, nest.block

    def put(column: Expr, word: Expr | None) -> Stmt:
        at = nest.panel_at(g, nb, pair) + column
        bit = T.const(0, "uint32") if word is None else word
        return store(nest.panel, at, bit.astype("int32"))

    def vector(j: Expr) -> Stmt:
        first = nb * block + j * COLUMNS

        def lane(v: Expr) -> Stmt:
            return put(j * COLUMNS + v, value(first + v))

        def along() -> Stmt:
            return nest.reader.scope(lambda: [loop(COLUMNS, lane, VECTORIZED, "v")])

        if n % block == 0:
            return along()

        def tail(v: Expr) -> Stmt:
            return when(first + v < n, lane(v), put(j * COLUMNS + v, None))

        return when(first + COLUMNS <= n, along(), loop(COLUMNS, tail, name="v"))

    return loop(block // COLUMNS, vector, name="j")


def _nothing(nest: PairNest, g: Expr, nb: Expr, first: Expr, count: int) -> Stmt | None:
    """Zeros in ``count`` pairs."""
    if not count:
        return None
    return loop(count, lambda p: _line(nest, g, nb, first + p, lambda _: None), name="k")
