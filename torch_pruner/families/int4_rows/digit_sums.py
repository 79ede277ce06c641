"""Weights of four bits times digits of a row in fixed point: whole numbers, sums that are exact.

The nibbles of a word, set off by eight, are two words of four bytes without a sign, which are
multiplied with four digits that have one. Floats are made of sums where a group is scaled.

* ``Quads``: one instruction of AVX512-VNNI adds the four products of each of sixteen columns to a
  sum of 32 bits, of a whole group.
* ``Pairs``: AVX2 adds products in pairs, to sums of 16 bits. They hold what ``form.PART_WORDS``
  words give, beginning with what their digits are set off by; what is left of both sums of a column
  and of the digits is put together in whole numbers, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    importing,
    loop,
    seq,
    stack,
    vector,
)
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.families.int4_rows.form import DIGITS_EACH, QUAD_LANES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.int4_rows.digits import FixedPoint

_NAME, _SUM = "torch_pruner_nibble_dot", "torch_pruner_digit_sum"
_OFF = "torch_pruner_nibbles_off"
_NIBBLES = 0x0F0F0F0F
_EIGHTS, _ALL_EIGHTS = 0x08080808, 0x88888888 - (1 << 32)
_QUADS = f"""
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)
define <16 x i32> @{_NAME}(<16 x i32> %c, <16 x i32> %a, <16 x i32> %b) alwaysinline {{
  %x = bitcast <16 x i32> %a to <64 x i8>
  %y = bitcast <16 x i32> %b to <64 x i8>
  %r = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %c, <64 x i8> %x, <64 x i8> %y)
  ret <16 x i32> %r
}}
"""
# LLVM would move the exclusive or behind the masks, where it is two: it must not look through one.
_PAIRS = f"""
declare <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8>, <32 x i8>)
declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)
define <8 x i32> @{_NAME}(<8 x i32> %c, <8 x i32> %a, <8 x i32> %b) alwaysinline {{
  %x = bitcast <8 x i32> %a to <32 x i8>
  %y = bitcast <8 x i32> %b to <32 x i8>
  %p = call <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8> %x, <32 x i8> %y)
  %before = bitcast <8 x i32> %c to <16 x i16>
  %s = add <16 x i16> %before, %p
  %r = bitcast <16 x i16> %s to <8 x i32>
  ret <8 x i32> %r
}}
define <8 x i32> @{_OFF}(<8 x i32> %given) alwaysinline {{
  %raised = xor <8 x i32> %given, splat (i32 {_ALL_EIGHTS})
  %r = call <8 x i32> asm "", "=x,0"(<8 x i32> %raised)
  ret <8 x i32> %r
}}
define <8 x float> @{_SUM}(<8 x i32> %a, <8 x i32> %b, <8 x i32> %c) alwaysinline {{
  %x = bitcast <8 x i32> %a to <16 x i16>
  %y = bitcast <8 x i32> %b to <16 x i16>
  %z = bitcast <8 x i32> %c to <16 x i16>
  %first = call <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16> %x, <16 x i16> splat (i16 1))
  %second = call <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16> %y, <16 x i16> splat (i16 256))
  %third = call <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16> %z, <16 x i16> splat (i16 1))
  %lower = add <8 x i32> %first, %second
  %low = sitofp <8 x i32> %lower to <8 x float>
  %high = sitofp <8 x i32> %third to <8 x float>
  %up = fmul <8 x float> %high, splat (float 65536.0)
  %r = fadd <8 x float> %up, %low
  ret <8 x float> %r
}}
"""


@dataclass(frozen=True, slots=True)
class DigitSums(ABC):
    """Sums of products of a panel with the digits of all rows."""

    fixed: FixedPoint
    vectors: int  # of the panel
    acc: Buffer  # of a group or a part of it: (digit, row, column)
    total: Buffer  # as many as a tile has

    code = ""
    """Of what sums call."""

    @abstractmethod
    def word(self, nb: Expr, g: Expr, w: Expr) -> Stmt:
        """Adds what the words ``w`` of a group give."""

    @abstractmethod
    def sums(self, m: Expr, j: Expr) -> Expr:
        """A vector of what was added, as floats."""

    def added(self, nb: Expr, ahead: int) -> Stmt:
        """Adds a panel's products to the total."""
        weights = self.fixed.weights
        whole, rest = divmod(self.fixed.nest.con.depth, weights.group)

        def group(g: Expr, count: int) -> Stmt:
            return self._group(nb, g, count, ahead)

        return seq(
            [
                stack(self.acc),
                loop(whole, lambda g: group(g, self.fixed.words), name="g") if whole else None,
                group(imm(whole), -(-rest // weights.per_word)) if rest else None,
            ]
        )

    def _group(self, nb: Expr, g: Expr, count: int, ahead: int) -> Stmt:
        """The first ``count`` words of a group, part by part."""
        fixed = self.fixed
        each = fixed.words // fixed.form.parts

        def word(w: Expr) -> Stmt:
            fetch = fixed.weights.fetch(nb, g * fixed.words + w, ahead)
            return seq([fetch, self.word(nb, g, w)])

        def part(p: Expr, first: Expr, many: int) -> Stmt:
            words = loop(many, lambda w: word(first + w), name="w")
            return seq([self._begin(g, p), words, self._fold(nb, g)])

        whole, rest = divmod(count, each)
        return seq(
            [
                loop(whole, lambda p: part(p, p * each, each), name="part") if whole else None,
                part(imm(whole), imm(whole * each), rest) if rest else None,
            ]
        )

    def at(self, k: Expr | int, m: Expr, j: Expr) -> Expr:
        """The index of a vector of ``acc``."""
        nest = self.fixed.nest
        return vector((k * nest.con.rows + m) * nest.bn + j * nest.vl, nest.vl)

    def each(self, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """``body`` of every row and vector."""

        def row(m: Expr) -> Stmt:
            return loop(self.vectors, lambda j: body(m, j), UNROLLED, "j")

        return loop(self.fixed.nest.con.rows, row, UNROLLED, "m")

    def parts(self, body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
        """``body`` of every digit, row and vector."""
        return loop(DIGITS_EACH, lambda k: self.each(lambda m, j: body(k, m, j)), UNROLLED, "k")

    def lanes(self, value: Expr | int) -> Expr:
        """A word in all lanes."""
        word = T.const(value, "int32") if isinstance(value, int) else value
        return T.Broadcast(word, self.fixed.nest.vl)

    def given(self, nb: Expr, g: Expr, w: Expr, j: Expr) -> Expr:
        """A vector of words of the weights."""
        nest, weights = self.fixed.nest, self.fixed.weights
        row = nb * weights.word_rows + g * self.fixed.words + w
        return weights.words[vector(row * nest.bn + j * nest.vl, nest.vl)]

    def plus(self, k: Expr, m: Expr, j: Expr, nibbles: Expr, digits: Expr) -> Stmt:
        """Adds products of four nibbles of each lane with four digits."""
        at, lanes = self.at(k, m, j), self.fixed.nest.vl
        found = T.call_extern(f"int32x{lanes}", _NAME, self.acc[at], nibbles, self.lanes(digits))
        return S.BufferStore(self.acc, found, [at])

    def _begin(self, g: Expr, part: Expr) -> Stmt:
        """Sums are what their digits are set off by."""
        fixed = self.fixed

        def one(k: Expr, m: Expr, j: Expr) -> Stmt:
            first = fixed.kept[fixed.fact(m, g, part * DIGITS_EACH + k)]
            return S.BufferStore(self.acc, self.lanes(first), [self.at(k, m, j)])

        return self.parts(one)

    def _fold(self, nb: Expr, g: Expr) -> Stmt:
        """Adds sums to the total, scaled."""
        nest, weights, total = self.fixed.nest, self.fixed.weights, self.total

        def one(m: Expr, j: Expr) -> Stmt:
            scale = self.fixed.scale(m, g)
            factor = weights.scale(nb, g, j) * T.Broadcast(scale, nest.vl)
            place = vector(m * nest.bn + j * nest.vl, nest.vl)
            return S.BufferStore(total, total[place] + self.sums(m, j) * factor, [place])

        return self.each(one)


class Quads(DigitSums):
    """See the module."""

    code = _QUADS

    def word(self, nb: Expr, g: Expr, w: Expr) -> Stmt:
        fixed = self.fixed

        def nibbles(j: Expr, half: int) -> Expr:
            given = self.given(nb, g, w, j)
            moved = T.shift_right(given, self.lanes(4)) if half else given
            return T.bitwise_xor(T.bitwise_and(moved, self.lanes(_NIBBLES)), self.lanes(_EIGHTS))

        def one(k: Expr, m: Expr, j: Expr) -> Stmt:
            digits = [fixed.kept[fixed.digits(m, g, k, half, w)] for half in (0, 1)]
            return seq([self.plus(k, m, j, nibbles(j, h), d) for h, d in enumerate(digits)])

        return self.parts(one)

    def sums(self, m: Expr, j: Expr) -> Expr:
        lanes = self.fixed.nest.vl
        low, middle, high = (
            self.acc[self.at(k, m, j)].astype(f"float32x{lanes}") for k in range(DIGITS_EACH)
        )
        base = T.Broadcast(T.const(256.0, "float32"), lanes)
        return (high * base + middle) * base + low


class Pairs(DigitSums):
    """See the module."""

    code = _PAIRS

    def word(self, nb: Expr, g: Expr, w: Expr) -> Stmt:
        fixed = self.fixed

        lanes = fixed.nest.vl
        near = buffer(fixed.nest.bn, "int32", "near", scope="local")

        def read(j: Expr) -> Stmt:
            words = T.call_extern(f"int32x{lanes}", _OFF, self.given(nb, g, w, j))
            return S.BufferStore(near, words, [vector(j * lanes, lanes)])

        def nibbles(j: Expr, half: int) -> Expr:
            given = near[vector(j * lanes, lanes)]
            moved = T.shift_right(given, self.lanes(4)) if half else given
            return T.bitwise_and(moved, self.lanes(_NIBBLES))

        def one(half: int) -> Callable[[Expr, Expr, Expr], Stmt]:
            return lambda k, m, j: self.plus(
                k, m, j, nibbles(j, half), fixed.kept[fixed.digits(m, g, k, half, w)]
            )

        reading = loop(self.vectors, read, UNROLLED, "j")
        return seq([stack(near), reading, *(self.parts(one(half)) for half in (0, 1))])

    def sums(self, m: Expr, j: Expr) -> Expr:
        found = (self.acc[self.at(k, m, j)] for k in range(DIGITS_EACH))
        return T.call_extern(f"float32x{self.fixed.nest.vl}", _SUM, *found)


def sums_of(fixed: FixedPoint, vectors: int, total: Buffer) -> DigitSums:
    """How the target that has vectors of so many lanes multiplies digits."""
    nest = fixed.nest
    way = Quads if nest.vl == QUAD_LANES else Pairs
    acc = buffer(DIGITS_EACH * nest.con.rows * nest.bn, "int32", "acc", scope="local")
    return way(fixed, vectors, acc, total)


def within(fixed: FixedPoint, body: Stmt) -> Stmt:
    """``body`` with what it calls."""
    return importing((Quads if fixed.nest.vl == QUAD_LANES else Pairs).code, body)
