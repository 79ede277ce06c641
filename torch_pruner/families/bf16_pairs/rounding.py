"""Vectors of float32 rounded to bfloat16 by AVX512-BF16: one instruction where bits take ten.

Ties go to even, NaN stays NaN; numbers below the least normal one become 0, which differs from what
rounding by bits gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import (
    VECTORIZED,
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
from torch_pruner.families.bf16_pairs.form import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NAME = "torch_pruner_round"
_IR = f"""
declare <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float>)
define <16 x i16> @{_NAME}(<16 x float> %x) alwaysinline {{
  %r = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> %x)
  %b = bitcast <16 x bfloat> %r to <16 x i16>
  ret <16 x i16> %b
}}
"""


def rounded_vector(
    out: Buffer,
    at: Expr,
    value: Callable[[Expr], Expr],
    scope: Callable[[Callable[[], Sequence[Stmt]]], Stmt],
) -> Stmt:
    """``out[at + v] = value(v)`` for the lanes of a vector; ``scope``: a reader's."""
    lanes = buffer(COLUMNS, "float32", "lanes", scope="local")

    def each() -> list[Stmt]:
        def lane(v: Expr) -> Stmt:
            return S.BufferStore(lanes, value(v), [v])

        return [loop(COLUMNS, lane, VECTORIZED, "v")]

    whole = lanes[vector(imm(0), COLUMNS)]
    rounded = T.call_extern("uint16x16", _NAME, whole)
    stored = S.BufferStore(out, rounded, [vector(at, COLUMNS)])
    return importing(_IR, seq([stack(lanes), scope(each), stored]))
