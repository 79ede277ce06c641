"""A row in fixed point, for products of its digits with weights of four bits (``digit_sums``).

A group of a row is numbers of 22 bits and one power of two, each number three signed digits to the
base 256. What fixed point cannot hold (infinities, NaN, groups of tiny numbers) says so, and the
row is taken as floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    Stmt,
    T,
    buffer,
    enclosed,
    loop,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.int4_rows.form import DIGITS_EACH, HALF, fixed_point

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.parts.nibbles import Nibbles
    from torch_pruner.codegen.parts.operands import Nest
    from torch_pruner.families.int4_rows.form import FixedRow

_LANES = 16
_BITS = 21  # of a number, beside the one before its point and its sign
_LEAST, _MOST = 22, 254  # exponents of float32 whose groups fixed point holds
_BIAS, _MANTISSA = 127, 23  # bits of a float32
_ROUND = 12582912.0  # 1.5 * 2^23: what is added to it is rounded to a whole number


def _word(value: int) -> Expr:
    return T.const(value, "int32")


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

    @property
    def form(self) -> FixedRow:
        return fixed_point(self.nest.con, self.weights.group, self.nest.vl)

    def digits(self, row: Expr, g: Expr, k: Expr, half: int, w: Expr) -> Expr:
        """Where four digits ``k`` are: those of the lower (or upper) nibbles of word ``w``."""
        at = ((g * DIGITS_EACH + k) * 2 + half) * self.words + w
        return row * self.form.size + at

    def fact(self, row: Expr, g: Expr, k: Expr | int) -> Expr:
        """Where fact ``k`` of a group is."""
        each = self.form
        return row * each.size + each.digits + g * each.each + k

    def scale(self, row: Expr, g: Expr) -> Expr:
        """The power of two of a group."""
        return T.reinterpret("float32", self.kept[self.fact(row, g, self.form.each - 1)])

    def usable(self) -> Expr:
        """Whether fixed point holds all rows."""
        found: Expr | None = None
        for m in range(self.nest.con.rows):
            one = self.kept[self.fact(imm(m), imm(self.weights.groups), 0)] > 0
            found = one if found is None else T.all(found, one)
        assert found is not None
        return found

    def make(self, value: Callable[[Expr, Expr], Expr]) -> Stmt:
        """Of each row, whose elements ``value`` gives."""

        def row(m: Expr) -> Stmt:
            good = buffer(1, "int32", "good", scope="local")
            groups = loop(self.weights.groups, lambda g: self._group(m, g, value, good), name="g")
            at = self.fact(m, imm(self.weights.groups), 0)
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
                when(fits, store(self.kept, self.fact(row, g, self.form.each - 1), scale),
                     seq([store(good, 0, _word(0)),
                          store(self.kept, self.fact(row, g, self.form.each - 1), _word(0))])),
                vectors(fix),
                self._cut(row, g, fixed, good),
            ]
        )  # fmt: skip

    def _cut(self, row: Expr, g: Expr, fixed: Buffer, good: Buffer) -> Stmt:
        """Digits of a group, in words of four as nibbles are, and what eight times each sum is."""
        words, per_word, slots = self.words, self.weights.per_word, self.form.slots
        sums = buffer(DIGITS_EACH * slots * words, "int32", "sums", scope="local")

        def lane(w: Expr) -> Stmt:
            packed: dict[tuple[int, int], Expr] = {}
            added: list[Expr] = [_word(0)] * (DIGITS_EACH * slots)
            for i in range(per_word):
                number = fixed[w * per_word + i]
                byte, half = divmod(i, 2)
                for k in range(DIGITS_EACH):
                    more = T.shift_right(number + _word(128), _word(8))
                    digit = number - T.shift_left(more, _word(8))
                    slot = k * slots + i * slots // per_word
                    added[slot] = added[slot] + digit
                    here = T.shift_left(T.bitwise_and(digit, _word(255)), _word(8 * byte))
                    before = packed.get((k, half))
                    packed[k, half] = here if before is None else T.bitwise_or(before, here)
                    number = more
            stores = [
                store(self.kept, self.digits(row, g, imm(k), half, w), word)
                for (k, half), word in packed.items()
            ]
            return seq([*stores, *(store(sums, k * words + w, s) for k, s in enumerate(added))])

        parts = [self._offsets(row, g, p, sums, good) for p in range(self.form.parts)]
        return seq([stack(sums), loop(words, lane, VECTORIZED, "w"), *parts])

    def _offsets(self, row: Expr, g: Expr, part: int, sums: Buffer, good: Buffer) -> Stmt:
        """What eight times the sums of a part of a group are, which the nibbles are set off by."""
        slots, each = self.form.slots, self.words // self.form.parts
        totals = buffer(DIGITS_EACH * slots, "int32", "totals", scope="local")

        def total(k: Expr) -> Stmt:
            def add(w: Expr) -> Stmt:
                return store(totals, k, totals[k] + sums[k * self.words + part * each + w])

            # Where sums have 16 bits this is the only one that is too large.
            most = store(good, 0, T.Select(totals[k] == _word(-HALF // 8), _word(0), good[0]))
            adding = loop(each, add, UNROLLED, "w")
            return seq([store(totals, k, _word(0)), adding, most if slots > 1 else None])

        def fact(k: int) -> Expr:
            first, *second = (totals[k * slots + i] * _word(-8) for i in range(slots))
            if not second:
                return first
            low = T.bitwise_and(first, _word(0xFFFF))
            return T.bitwise_or(low, T.shift_left(second[0], _word(16)))

        stores = [
            store(self.kept, self.fact(row, g, part * DIGITS_EACH + k), fact(k))
            for k in range(DIGITS_EACH)
        ]
        return seq([stack(totals), loop(DIGITS_EACH * slots, total, UNROLLED, "k"), *stores])
