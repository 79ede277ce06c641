"""``vdpbf16ps`` of AVX512-BF16: to each of 16 sums the products of one pair of bfloat16 are added.

Vectors of bfloat16 do not survive TVM's own passes, so operands travel as words of two.
"""

from __future__ import annotations

from torch_pruner.codegen.tir.builders import Expr, Stmt, T, importing

SUMS = 16

_NAME = "torch_pruner_dot"
_IR = f"""
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define <16 x float> @{_NAME}(<16 x float> %c, <16 x i32> %a, <16 x i32> %b) alwaysinline {{
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
      <16 x float> %c, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}}
"""


def with_pair_dots(body: Stmt) -> Stmt:
    """``body``, in which ``pair_dot`` may stand."""
    return importing(_IR, body)


def pair_dot(sums: Expr, a: Expr, b: Expr) -> Expr:
    """``sums`` (float32x16) and the products of ``a`` and ``b`` (int32x16: pairs of bfloat16)."""
    found: Expr = T.call_extern(f"float32x{SUMS}", _NAME, sums, a, b)
    return found
