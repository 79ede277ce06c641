"""Weights of four bits times a row in fixed point: whole numbers, four products an instruction.

A group of a row is numbers of 22 bits and one power of two, each number three signed digits to the
base 256. The nibbles of a word, set off by eight, are two words of four bytes without a sign; one
instruction multiplies the bytes of sixteen columns with four digits and adds all to sums of 32
bits. Sums of a group are exact; floats are made of them once, where a group is scaled. What fixed
point cannot hold (infinities, NaN, groups of tiny numbers) says so, and the row is taken as floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    enclosed,
    importing,
    loop,
    seq,
    stack,
    vector,
    when,
)
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.int4_rows.form import DIGITS_EACH, FACTS, fixed_point

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.parts.nibbles import Nibbles
    from torch_pruner.codegen.parts.operands import Nest

_LANES = 16
_NAME = "torch_pruner_nibble_dot"
_IR = f"""
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)
define <16 x i32> @{_NAME}(<16 x i32> %c, <16 x i32> %a, <16 x i32> %b) alwaysinline {{
  %x = bitcast <16 x i32> %a to <64 x i8>
  %y = bitcast <16 x i32> %b to <64 x i8>
  %r = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %c, <64 x i8> %x, <64 x i8> %y)
  ret <16 x i32> %r
}}
"""
_BITS = 21  # of a number, beside the one before its point and its sign
_LEAST, _MOST = 22, 254  # exponents of float32 whose groups fixed point holds
_BIAS, _MANTISSA = 127, 23  # bits of a float32
_ROUND = 12582912.0  # 1.5 * 2^23: what is added to it is rounded to a whole number
_NIBBLES, _EIGHTS = 0x0F0F0F0F, 0x08080808


def _word(value: int) -> Expr:
    return T.const(value, "int32")


def _all(value: Expr | int) -> Expr:
    return T.Broadcast(_word(value) if isinstance(value, int) else value, _LANES)


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Rows in fixed point, in ``kept``: as ``form.fixed_point`` says."""

    nest: Nest
    weights: Nibbles
    kept: Buffer

    @property
    def words(self) -> int:
        """Words of a group, in a column of the weights."""
        return self.weights.group // self.weights.per_word

    def _digits(self, row: Expr, g: Expr, k: Expr, half: int, w: Expr) -> Expr:
        each = fixed_point(self.nest.con, self.weights.group)
        at = ((g * DIGITS_EACH + k) * 2 + half) * self.words + w
        return row * each.size + at

    def _fact(self, row: Expr, g: Expr, k: int) -> Expr:
        each = fixed_point(self.nest.con, self.weights.group)
        return row * each.size + each.digits + g * FACTS + k

    def usable(self) -> Expr:
        """Whether fixed point holds all rows."""
        found: Expr | None = None
        for m in range(self.nest.con.rows):
            one = self.kept[self._fact(imm(m), imm(self.weights.groups), 0)] > 0
            found = one if found is None else T.all(found, one)
        assert found is not None
        return found

    def make(self, value: Callable[[Expr, Expr], Expr]) -> Stmt:
        """Of each row, whose elements ``value`` gives."""

        def row(m: Expr) -> Stmt:
            good = buffer(1, "int32", "good", scope="local")
            groups = loop(self.weights.groups, lambda g: self._group(m, g, value, good), name="g")
            at = self._fact(m, imm(self.weights.groups), 0)
            return seq(
                [stack(good), store(good, 0, _word(1)), groups, store(self.kept, at, good[0])]
            )

        if self.nest.con.rows == 1:  # a part of its own: what it defines is not the panels'
            return enclosed(row(imm(0)))
        return loop(self.nest.con.rows, row, self.nest.kind, name="row")

    def _group(self, row: Expr, g: Expr, value: Callable[[Expr, Expr], Expr], good: Buffer) -> Stmt:
        group, depth = self.weights.group, self.nest.con.depth
        floats = buffer(group, "float32", "x", scope="local")
        fixed = buffer(group, "int32", "fixed", scope="local")
        top = buffer(_LANES, "int32", "top", scope="local")
        most = buffer(1, "int32", "most", scope="local")

        def vectors(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
            def some(o: Expr) -> Stmt:
                return loop(_LANES, lambda v: body(o * _LANES + v, v), VECTORIZED, "v")

            return loop(group // _LANES, some, UNROLLED, "o")

        def read(count: int) -> Stmt:
            def some(o: Expr) -> Stmt:
                def lane(v: Expr) -> Stmt:
                    at = o * _LANES + v
                    return store(floats, at, value(row, g * group + at))

                return self.nest.reader.scope(lambda: [loop(_LANES, lane, VECTORIZED, "v")])

            whole, rest = divmod(count, _LANES)
            first = whole * _LANES
            return seq(
                [
                    loop(whole, some, UNROLLED, "o") if whole else None,
                    loop(
                        rest, lambda v: store(floats, first + v, value(row, g * group + first + v))
                    )
                    if rest
                    else None,
                    loop(group - count, lambda v: store(floats, count + v, T.const(0.0, "float32")))
                    if count < group
                    else None,
                ]
            )

        def bits(at: Expr) -> Expr:
            return T.bitwise_and(T.reinterpret("int32", floats[at]), _word(0x7FFFFFFF))

        exponent = T.shift_right(most[0], _word(_MANTISSA))
        held = T.max(exponent, _word(_LEAST))
        turned = T.shift_left(_word(2 * _BIAS + _BITS) - held, _word(_MANTISSA))
        scale = T.shift_left(held - _BITS, _word(_MANTISSA))
        fits = T.any(most[0] == 0, T.all(exponent >= _LEAST, exponent <= _MOST))
        raised = _word(0x4B400000)

        def fix(at: Expr, _: Expr) -> Stmt:
            moved = floats[at] * T.reinterpret("float32", turned) + T.const(_ROUND, "float32")
            return store(fixed, at, T.reinterpret("int32", moved) - raised)

        rest = depth % group
        last = self.weights.groups - 1
        reading = read(group) if not rest else when(g < last, read(group), read(rest))
        return seq(
            [
                *(stack(b) for b in (floats, fixed, top, most)),
                reading,
                loop(_LANES, lambda v: store(top, v, _word(0)), VECTORIZED, "v"),
                vectors(lambda at, v: store(top, v, T.max(top[v], bits(at)))),
                store(most, 0, _word(0)),
                loop(_LANES, lambda v: store(most, 0, T.max(most[0], top[v])), UNROLLED, "v"),
                when(fits, store(self.kept, self._fact(row, g, DIGITS_EACH), scale),
                     seq([store(good, 0, _word(0)),
                          store(self.kept, self._fact(row, g, DIGITS_EACH), _word(0))])),
                vectors(fix),
                self._cut(row, g, fixed),
            ]
        )  # fmt: skip

    def _cut(self, row: Expr, g: Expr, fixed: Buffer) -> Stmt:
        """Digits of a group, in words of four as nibbles are, and what eight times each sum is."""
        words, per_word = self.words, self.weights.per_word
        sums = buffer(DIGITS_EACH * words, "int32", "sums", scope="local")
        totals = buffer(DIGITS_EACH, "int32", "totals", scope="local")

        def lane(w: Expr) -> Stmt:
            packed: dict[tuple[int, int], Expr] = {}
            added: list[Expr] = [_word(0)] * DIGITS_EACH
            for i in range(per_word):
                number = fixed[w * per_word + i]
                byte, half = divmod(i, 2)
                for k in range(DIGITS_EACH):
                    more = T.shift_right(number + _word(128), _word(8))
                    digit = number - T.shift_left(more, _word(8))
                    added[k] = added[k] + digit
                    here = T.shift_left(T.bitwise_and(digit, _word(255)), _word(8 * byte))
                    before = packed.get((k, half))
                    packed[k, half] = here if before is None else T.bitwise_or(before, here)
                    number = more
            stores = [
                store(self.kept, self._digits(row, g, imm(k), half, w), word)
                for (k, half), word in packed.items()
            ]
            return seq([*stores, *(store(sums, k * words + w, s) for k, s in enumerate(added))])

        def total(k: Expr) -> Stmt:
            added = loop(
                words, lambda w: store(totals, k, totals[k] + sums[k * words + w]), UNROLLED, "w"
            )
            return seq([store(totals, k, _word(0)), added])

        return seq(
            [
                stack(sums),
                stack(totals),
                loop(words, lane, VECTORIZED, "w"),
                loop(DIGITS_EACH, total, UNROLLED, "k"),
                *(
                    store(self.kept, self._fact(row, g, k), totals[k] * _word(-8))
                    for k in range(DIGITS_EACH)
                ),
            ]
        )

    def panel(self, nb: Expr, vectors: int, total: Buffer, ahead: int) -> Stmt:
        """Adds a panel's products to ``total``, as many sums as a tile has."""
        nest, weights = self.nest, self.weights
        rows, vl, bn = nest.con.rows, nest.vl, nest.bn
        acc = buffer(DIGITS_EACH * rows * bn, "int32", "acc", scope="local")

        def at(k: Expr, m: Expr, j: Expr) -> Expr:
            return vector((k * rows + m) * bn + j * vl, vl)

        def each(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
            def row(m: Expr) -> Stmt:
                return loop(vectors, lambda j: body(m, j), UNROLLED, "j")

            return loop(rows, row, UNROLLED, "m")

        def parts(body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
            return loop(DIGITS_EACH, lambda k: each(lambda m, j: body(k, m, j)), UNROLLED, "k")

        def begin(g: Expr) -> Stmt:
            def one(k: Expr, m: Expr, j: Expr) -> Stmt:
                first = self.kept[self._fact(m, g, 0) + k]
                return S.BufferStore(acc, _all(first), [at(k, m, j)])

            return parts(one)

        def word(g: Expr, w: Expr) -> Stmt:
            line = g * self.words + w

            def nibbles(j: Expr, half: int) -> Expr:
                given = weights.words[vector((nb * weights.word_rows + line) * bn + j * vl, vl)]
                moved = T.shift_right(given, _all(4)) if half else given
                return T.bitwise_xor(T.bitwise_and(moved, _all(_NIBBLES)), _all(_EIGHTS))

            def one(k: Expr, m: Expr, j: Expr) -> Stmt:
                total = acc[at(k, m, j)]
                for half in (0, 1):
                    digits = _all(self.kept[self._digits(m, g, k, half, w)])
                    total = T.call_extern("int32x16", _NAME, total, nibbles(j, half), digits)
                return S.BufferStore(acc, total, [at(k, m, j)])

            return seq([weights.fetch(nb, line, ahead), parts(one)])

        def fold(g: Expr) -> Stmt:
            def one(m: Expr, j: Expr) -> Stmt:
                def sums(k: int) -> Expr:
                    return acc[at(imm(k), m, j)].astype(f"float32x{vl}")

                base = T.Broadcast(T.const(256.0, "float32"), vl)
                found = (sums(2) * base + sums(1)) * base + sums(0)
                scale = T.reinterpret("float32", self.kept[self._fact(m, g, DIGITS_EACH)])
                factor = weights.scale(nb, g, j) * T.Broadcast(scale, vl)
                place = vector(m * bn + j * vl, vl)
                return S.BufferStore(total, total[place] + found * factor, [place])

            return each(one)

        def group(g: Expr, count: int) -> Stmt:
            return seq([begin(g), loop(count, lambda w: word(g, w), name="w"), fold(g)])

        whole, rest = divmod(nest.con.depth, weights.group)
        return seq(
            [
                stack(acc),
                loop(whole, lambda g: group(g, self.words), name="g") if whole else None,
                group(imm(whole), -(-rest // weights.per_word)) if rest else None,
            ]
        )


def within(body: Stmt) -> Stmt:
    """``body`` with what it calls."""
    return importing(_IR, body)
