"""Weights of few bits as kernels read them: a vector of words of a panel becomes some of floats.

Lanes are columns, so a word's numbers are positions of the reduction. Numbers of four bits become
floats in one of these ways (``LOOKED_UP`` where a register holds sixteen floats), all exact:

* ``CONVERTED``: two shifts, which extend the sign, and a conversion.
* ``LOOKED_UP``: a shift, and ``vpermps``, which takes the lowest four bits of each lane.
* ``IN_MANTISSA``: bits are set into the mantissa of a power of two, where they lie in the word, and
  that power is subtracted. Both are instructions that most units of a core have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import (
    Buffer,
    Expr,
    Stmt,
    T,
    importing,
    prefetch,
    seq,
    vector,
)
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.graph.nibbles import IN_MANTISSA, LOOKED_UP, WORD, per_word

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.operands import Nest

_LINE = 64  # bytes
_NAME = "torch_pruner_level"
_LEVELS = ", ".join(f"float {float(v)}" for v in (*range(8), *range(-8, 0)))
_IR = f"""
declare <16 x float> @llvm.x86.avx512.permvar.sf.512(<16 x float>, <16 x i32>)
define <16 x float> @{_NAME}(<16 x i32> %i) alwaysinline {{
  %r = call <16 x float> @llvm.x86.avx512.permvar.sf.512(
      <16 x float> <{_LEVELS}>, <16 x i32> %i)
  ret <16 x float> %r
}}
"""
TABLE_LANES = 16
_MANTISSA, _BIAS = 23, 127  # bits of a float32
_IN_PLACE = 5  # numbers of four bits that a mantissa has room for


@dataclass(frozen=True, slots=True)
class Nibbles:
    """The packed operands of one product: panels ``[column block][row][column]`` of each."""

    nest: Nest
    bits: int
    group: int
    words: Buffer
    scales: Buffer
    offsets: Buffer | None
    way: int  # CONVERTED, LOOKED_UP or IN_MANTISSA

    @property
    def per_word(self) -> int:
        """Numbers in a word: positions of the reduction."""
        return per_word(self.bits)

    @property
    def word_rows(self) -> int:
        """Words in a column."""
        return -(-self.nest.con.depth // self.per_word)

    @property
    def groups(self) -> int:
        """Groups in a column."""
        return -(-self.nest.con.depth // self.group)

    def level(self, nb: Expr, row: Expr, i: Expr, j: Expr) -> Expr:
        """Number ``i`` of the words of row ``row``, vector ``j`` of panel ``nb``, as floats."""
        lanes = self.nest.vl
        words = self.words[self._at(nb, row, j, self.word_rows)]

        def by(bits: Expr) -> Expr:
            return T.Broadcast(bits.astype("int32"), lanes)

        if self.way == IN_MANTISSA:
            return self._in_mantissa(words, i)
        if self.way == LOOKED_UP:
            return T.call_extern(f"float32x{lanes}", _NAME, T.shift_right(words, by(i * self.bits)))
        highest = imm(WORD - self.bits)
        shifted = T.shift_left(words, by(highest - i * self.bits))
        return T.shift_right(shifted, by(highest)).astype(f"float32x{lanes}")

    def _in_mantissa(self, words: Expr, i: Expr) -> Expr:
        """With the power of two whose mantissa's bit, where a number begins, counts one."""
        lanes, one = self.nest.vl, imm(1)
        first = T.floormod(i, _IN_PLACE) * self.bits
        moved = T.floordiv(i, _IN_PLACE) * (_IN_PLACE * self.bits)
        exponent = T.shift_left(imm(_BIAS + _MANTISSA) - first, imm(_MANTISSA))
        power = exponent + T.shift_left(one, first + (self.bits - 1))  # and the sign, which is set
        mask = T.shift_left(imm((1 << self.bits) - 1), first)

        def all_lanes(bits: Expr) -> Expr:
            return T.Broadcast(bits.astype("int32"), lanes)

        number = T.bitwise_and(T.shift_right(words, all_lanes(moved)), all_lanes(mask))
        raised = T.bitwise_xor(number, all_lanes(power))
        as_floats = f"float32x{lanes}"
        return T.reinterpret(as_floats, raised) - T.reinterpret(as_floats, all_lanes(power))

    def scale(self, nb: Expr, g: Expr, j: Expr) -> Expr:
        """The scales of group ``g``, vector ``j`` of panel ``nb``."""
        return _floats(self.scales, self._at(nb, g, j, self.groups), self.nest.vl)

    def weight(self, nb: Expr, row: Expr, i: Expr, j: Expr) -> Expr:
        """The same as ``level``, scaled and set off."""
        g = T.floordiv(row, self.group // self.per_word)
        scaled = self.level(nb, row, i, j) * self.scale(nb, g, j)
        if self.offsets is None:
            return scaled
        return scaled + _floats(self.offsets, self._at(nb, g, j, self.groups), self.nest.vl)

    def fetch(self, nb: Expr, row: Expr, ahead: int) -> Stmt | None:
        """Fetches what comes ``ahead`` bytes after a row of words."""
        if not ahead:
            return None
        words = _LINE // 4
        first = (nb * self.word_rows + row) * self.nest.bn + ahead // 4
        lines = range(-(-self.nest.bn // words))
        return seq([prefetch(self.words, first + words * k, once=True) for k in lines])

    def within(self, body: Stmt) -> Stmt:
        """``body`` with what it calls."""
        return importing(_IR, body) if self.way == LOOKED_UP else body

    def _at(self, nb: Expr, row: Expr, j: Expr, rows: int) -> Expr:
        nest = self.nest
        return vector((nb * rows + row) * nest.bn + j * nest.vl, nest.vl)


def _floats(buf: Buffer, at: Expr, lanes: int) -> Expr:
    """A vector of a buffer of float32 or bfloat16 as float32."""
    raw = buf[at]
    if str(buf.dtype) != "uint16":
        return raw.astype(f"float32x{lanes}")
    wide = raw.astype(f"uint32x{lanes}")
    up = T.Broadcast(T.const(16, "uint32"), lanes)
    return T.reinterpret(f"float32x{lanes}", T.shift_left(wide, up))
