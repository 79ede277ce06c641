"""Products of float32 operands rounded to tf32 in tensor cores (compute capability 8.0).

``mma.m16n8k8``: of each 16 by 8 block of the result a thread holds the sums that it holds of
``m16n8k16``; its operands lie 32 bits apart (PTX ISA, "Matrix fragments for mma.m16n8k8"). Four
neighbours along the reduction are the eight halves of a line of ``ldmatrix``, which hands a thread
two of them: one of the four. So lines along the reduction are loaded as those of halves are, and
others element by element. Operands are rounded to ten bits of mantissa, ties away from zero.
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

// Four matrices of eight lines of four elements; a lane gives the place of one line.
__device__ __forceinline__ void torch_pruner_tf32_lines(unsigned& a, unsigned& b, unsigned& c,
                                                        unsigned& d, const float* line) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(line));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(at));
  a = torch_pruner_tf32_of(__uint_as_float(a));
  b = torch_pruner_tf32_of(__uint_as_float(b));
  c = torch_pruner_tf32_of(__uint_as_float(c));
  d = torch_pruner_tf32_of(__uint_as_float(d));
}

__device__ __forceinline__ void torch_pruner_tf32_two_lines(unsigned& a, unsigned& b,
                                                            const float* line) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(line));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(a), "=r"(b)
               : "r"(at));
  a = torch_pruner_tf32_of(__uint_as_float(a));
  b = torch_pruner_tf32_of(__uint_as_float(b));
}

// The warp's MI x NI blocks, over DEPTH positions of the reduction. A's lines are rows, or
// positions of the reduction where TURNED says so. B's are positions of the reduction (0), columns
// (1), or all columns of four positions each (2).
template <int MI, int NI, int DEPTH, int B, bool TURNED>
__device__ __forceinline__ void torch_pruner_tf32(float* acc, const float* a, int lda,
                                                  const float* b, int ldb) {
  const int lane = threadIdx.x & 31, line = lane >> 2, at = lane & 3;
#pragma unroll
  for (int k = 0; k < DEPTH; k += 8) {
    unsigned left[MI][4], right[NI][2];
#pragma unroll
    for (int i = 0; i < MI; ++i) {
      if constexpr (TURNED) {
        const float* from = a + (k + at) * lda + i * 16 + line;
        left[i][0] = torch_pruner_tf32_of(from[0]);
        left[i][1] = torch_pruner_tf32_of(from[8]);
        left[i][2] = torch_pruner_tf32_of(from[4 * lda]);
        left[i][3] = torch_pruner_tf32_of(from[4 * lda + 8]);
      } else {
        torch_pruner_tf32_lines(left[i][0], left[i][1], left[i][2], left[i][3],
                                a + (i * 16 + (lane & 15)) * lda + k + (lane >> 4) * 4);
      }
    }
    if constexpr (B == 0) {
#pragma unroll
      for (int j = 0; j < NI; ++j) {
        const float* from = b + (k + at) * ldb + j * 8 + line;
        right[j][0] = torch_pruner_tf32_of(from[0]);
        right[j][1] = torch_pruner_tf32_of(from[4 * ldb]);
      }
    } else {
      const int column = B == 1 ? ldb : 4, four = B == 1 ? 4 : ldb;
      const float* from = b + (lane & 7) * column + (k / 4 + ((lane >> 3) & 1)) * four;
#pragma unroll
      for (int j = 0; j + 1 < NI; j += 2)  // two blocks of columns by one instruction
        torch_pruner_tf32_lines(right[j][0], right[j][1], right[j + 1][0], right[j + 1][1],
                                from + (j + (lane >> 4)) * 8 * column);
      if constexpr (NI % 2 == 1)
        torch_pruner_tf32_two_lines(right[NI - 1][0], right[NI - 1][1],
                                    from + (NI - 1) * 8 * column);
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
