"""Words of two bfloat16, as ``pair_dot`` takes its operands."""

from __future__ import annotations

from torch_pruner.codegen.parts.pair_dots import SUMS, pair_dot, with_pair_dots
from torch_pruner.codegen.tir.builders import Buffer, Expr, S, Stmt, T, importing, vector
from torch_pruner.codegen.tir.values import bits

WORD = "int32"
_NAME = "torch_pruner_words"
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
"""


def with_words(body: Stmt) -> Stmt:
    """``body``, in which ``words`` and ``added`` may stand."""
    return importing(_IR, with_pair_dots(body))


def word(first: Expr, second: Expr) -> Expr:
    """Two float32, rounded: the first in the lower half, as it lies in memory."""
    return T.reinterpret(WORD, T.bitwise_or(bits(first), T.shift_left(bits(second), _HALF)))


def words(first: Expr, second: Expr) -> Expr:
    """The same of two vectors (float32x16), by instructions for it: the least numbers become 0."""
    found: Expr = T.call_extern(f"{WORD}x{SUMS}", _NAME, first, second)
    return found


def added(sums: Buffer, at: Expr, one: Expr, others: Expr) -> Stmt:
    """To the vector of ``sums`` at ``at`` the products of a word and a vector of words."""
    place = vector(at, SUMS)
    return S.BufferStore(sums, pair_dot(sums[place], T.Broadcast(one, SUMS), others), [place])


_HALF = T.const(16, "uint32")
