"""Words of two bfloat16, as ``pair_dot`` takes its operands."""

from __future__ import annotations

from typing import TypeVar

from torch_pruner.codegen.parts.pair_dots import SUMS, pair_dot, with_pair_dots
from torch_pruner.codegen.tir.builders import Buffer, Expr, S, Stmt, T, imm, importing, vector
from torch_pruner.codegen.tir.values import bits

Count = TypeVar("Count", int, Expr, int | Expr)
WORD = "int32"
_NAME, _ROUND = "torch_pruner_words", "torch_pruner_rounded_words"
_IR = f"""
declare <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float>)
define <16 x i32> @{_NAME}(<16 x float> %a, <16 x float> %b) alwaysinline {{
  %x = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> %a)
  %y = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> %b)
  %i = bitcast <16 x bfloat> %x to <16 x i16>
  %j = bitcast <16 x bfloat> %y to <16 x i16>
  %l = zext <16 x i16> %i to <16 x i32>
  %h = zext <16 x i16> %j to <16 x i32>
  %s = shl <16 x i32> %h, splat (i32 16)
  %r = or <16 x i32> %l, %s
  ret <16 x i32> %r
}}
define <16 x i16> @{_ROUND}(<16 x float> %a) alwaysinline {{
  %x = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> %a)
  %i = bitcast <16 x bfloat> %x to <16 x i16>
  ret <16 x i16> %i
}}
"""


def in_pairs(count: Count) -> Count:
    """Pairs of so many, the last of which may be alone."""
    return -(-count // 2) if isinstance(count, int) else T.floordiv(count + 1, imm(2))


def with_words(body: Stmt) -> Stmt:
    """``body``, in which ``words`` and ``added`` may stand."""
    return importing(_IR, with_pair_dots(body))


def word(first: Expr, second: Expr) -> Expr:
    """Two float32, rounded: the first in the lower half, as it lies in memory."""
    return of_bits(bits(first), bits(second))


def of_bits(first: Expr, second: Expr) -> Expr:
    """The same of bits of bfloat16, as uint32."""
    return T.reinterpret(WORD, T.bitwise_or(first, T.shift_left(second, T.const(16, "uint32"))))


def both(source: Buffer, at: Expr) -> Expr:
    """The bfloat16 at ``at`` and the one behind it."""
    return T.reinterpret(WORD, source[vector(at, 2)])


def round_vector(value: Expr) -> Expr:
    """A vector (float32x16) rounded to bfloat16, as uint16: see ``words``."""
    found: Expr = T.call_extern(f"uint16x{SUMS}", _ROUND, value)
    return found


def words(first: Expr, second: Expr) -> Expr:
    """The same of two vectors (float32x16), by instructions for it: the least numbers become 0."""
    found: Expr = T.call_extern(f"{WORD}x{SUMS}", _NAME, first, second)
    return found


def added(sums: Buffer, at: Expr, one: Expr, others: Expr) -> Stmt:
    """To the vector of ``sums`` at ``at`` the products of a word and a vector of words."""
    place = vector(at, SUMS)
    return S.BufferStore(sums, pair_dot(sums[place], T.Broadcast(one, SUMS), others), [place])
