"""Products of float32 operands rounded to tf32 in tensor cores (compute capability 8.0).

``mma.m16n8k8``: of each 16 by 8 block of the result a thread holds the sums that it holds of
``m16n8k16``; its operands lie 32 bits apart, so they are read from shared memory one by one (PTX
ISA, "Matrix fragments for mma.m16n8k8"). Operands are rounded to ten bits of mantissa, ties away
from zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import T

if TYPE_CHECKING:
    from torch_pruner.codegen.tir.builders import Expr

NAME = "torch_pruner_tf32"
SOURCE = r"""
__device__ __forceinline__ unsigned torch_pruner_tf32_of(float value) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return rounded;
}

// The warp's MI x NI blocks, over DEPTH positions of the reduction. A's lines are rows, or
// positions of the reduction where TURNED says so; B's are positions of the reduction, or columns
// where COLUMNS says so.
template <int MI, int NI, int DEPTH, bool COLUMNS, bool TURNED>
__device__ __forceinline__ void torch_pruner_tf32(float* acc, const float* a, int lda,
                                                  const float* b, int ldb) {
  const int lane = threadIdx.x & 31, line = lane >> 2, at = lane & 3;
#pragma unroll
  for (int k = 0; k < DEPTH; k += 8) {
    unsigned left[MI][4], right[NI][2];
#pragma unroll
    for (int i = 0; i < MI; ++i) {
      const int row = TURNED ? 1 : lda, step = TURNED ? lda : 1;
      const float* from = a + (i * 16 + line) * row + (k + at) * step;
      left[i][0] = torch_pruner_tf32_of(from[0]);
      left[i][1] = torch_pruner_tf32_of(from[8 * row]);
      left[i][2] = torch_pruner_tf32_of(from[4 * step]);
      left[i][3] = torch_pruner_tf32_of(from[8 * row + 4 * step]);
    }
#pragma unroll
    for (int j = 0; j < NI; ++j) {
      const float* from = COLUMNS ? b + (j * 8 + line) * ldb + k + at
                                  : b + (k + at) * ldb + j * 8 + line;
      right[j][0] = torch_pruner_tf32_of(from[0]);
      right[j][1] = torch_pruner_tf32_of(from[COLUMNS ? 4 : 4 * ldb]);
    }
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int j = 0; j < NI; ++j) {
        float* c = acc + (i * NI + j) * 4;
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(left[i][0]), "r"(left[i][1]), "r"(left[i][2]), "r"(left[i][3]),
                       "r"(right[j][0]), "r"(right[j][1]));
      }
  }
}
"""


def rounded(value: Expr) -> Expr:
    """A float32 as tensor cores see it, on the host."""
    raw = T.reinterpret("uint32", value) + T.const(0x1000, "uint32")
    return T.reinterpret("float32", T.bitwise_and(raw, T.const(0xFFFFE000, "uint32")))
