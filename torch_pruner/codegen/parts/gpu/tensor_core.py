"""Products of fragments in tensor cores: CUDA C for the device, the same sums as loops on the host.

A warp multiplies a tile of A, rows of k in shared memory, by a tile of B, rows of n, with
``mma.m16n8k16`` (two of ``m16n8k8`` on compute capability 7.5, another where operands are float32:
``tf32``) and float32 sums. Of each 16 by 8
block of the result, thread ``lane`` of the warp holds four sums: row ``lane / 4`` and 8 rows below,
columns ``2 (lane % 4)`` and the next (PTX ISA, "Matrix fragments for mma.m16n8k16").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu import tf32
from torch_pruner.codegen.parts.gpu.grid import WARP, Registers
from torch_pruner.codegen.tir.builders import UNROLLED, Buffer, Expr, S, Stmt, T, loop
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.codegen.tir.values import load, round_bfloat16

if TYPE_CHECKING:
    from collections.abc import Callable

M, N, K = 16, 8, 16
SUMS = 4  # of a block, in each thread
NEIGHBOURS = 2  # of them, in a row
ROOM = 160  # registers of a thread for sums and fragments, of 255
NAME = "torch_pruner_mma"
SOURCE = r"""
template <bool BF16>
__device__ __forceinline__ void torch_pruner_mma_block(float* c, const unsigned* a,
                                                       const unsigned* b) {
#if __CUDA_ARCH__ >= 800
  if constexpr (BF16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  static_assert(!BF16, "bfloat16 needs compute capability 8.0");
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
  }
#endif
}

// What a warp multiplies at positions k to k + 15 of the reduction, from shared memory: A's rows.
template <int MI, bool TURNED>
__device__ __forceinline__ void torch_pruner_left(unsigned (&left)[MI][4], const unsigned short* a,
                                                  int lda, int k) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < MI; ++i) {
    if constexpr (TURNED) {
      unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(
          a + (k + (lane >> 4) * 8 + (lane & 7)) * lda + i * 16 + ((lane >> 3) & 1) * 8));
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(left[i][0]), "=r"(left[i][1]), "=r"(left[i][2]), "=r"(left[i][3])
                   : "r"(at));
    } else {
      unsigned at = static_cast<unsigned>(
          __cvta_generic_to_shared(a + (i * 16 + (lane & 15)) * lda + k + (lane >> 4) * 8));
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(left[i][0]), "=r"(left[i][1]), "=r"(left[i][2]), "=r"(left[i][3])
                   : "r"(at));
    }
  }
}

// And B's columns.
template <int NI, bool COLUMNS>
__device__ __forceinline__ void torch_pruner_right(unsigned (&right)[NI][2],
                                                   const unsigned short* b, int ldb, int k) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j + 1 < NI; j += 2) {  // two blocks of columns by one instruction
    if constexpr (COLUMNS) {
      unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(
          b + ((j + (lane >> 4)) * 8 + (lane & 7)) * ldb + k + ((lane >> 3) & 1) * 8));
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(right[j][0]), "=r"(right[j][1]), "=r"(right[j + 1][0]),
                     "=r"(right[j + 1][1])
                   : "r"(at));
    } else {
      unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(
          b + (k + (lane & 15)) * ldb + (j + (lane >> 4)) * 8));
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(right[j][0]), "=r"(right[j][1]), "=r"(right[j + 1][0]),
                     "=r"(right[j + 1][1])
                   : "r"(at));
    }
  }
  if constexpr (NI % 2 == 1) {
    constexpr int j = NI - 1;
    if constexpr (COLUMNS) {
      unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(
          b + (j * 8 + (lane & 7)) * ldb + k + ((lane >> 3) & 1) * 8));
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                   : "=r"(right[j][0]), "=r"(right[j][1])
                   : "r"(at));
    } else {
      unsigned at = static_cast<unsigned>(
          __cvta_generic_to_shared(b + (k + (lane & 15)) * ldb + j * 8));
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                   : "=r"(right[j][0]), "=r"(right[j][1])
                   : "r"(at));
    }
  }
}

// The warp's MI x NI blocks, over DEPTH positions of the reduction. A's lines are rows, or
// positions of the reduction where TURNED says so; B's are positions of the reduction, or columns
// where COLUMNS says so. With HELD of two the next fragments are on their way while these are
// multiplied: the assembler keeps the order of these instructions, and waits for each load else.
template <int MI, int NI, int DEPTH, bool BF16, bool COLUMNS, bool TURNED, int HELD>
__device__ __forceinline__ void torch_pruner_mma(float* acc, const void* tile_a, int lda,
                                                 const void* tile_b, int ldb) {
  const unsigned short* a = static_cast<const unsigned short*>(tile_a);
  const unsigned short* b = static_cast<const unsigned short*>(tile_b);
  unsigned left[HELD][MI][4], right[HELD][NI][2];
  torch_pruner_left<MI, TURNED>(left[0], a, lda, 0);
  torch_pruner_right<NI, COLUMNS>(right[0], b, ldb, 0);
#pragma unroll
  for (int k = 0; k < DEPTH; k += 16) {
    const int now = k / 16 % HELD, next = (k / 16 + 1) % HELD;
    if (HELD > 1 && k + 16 < DEPTH) {
      torch_pruner_left<MI, TURNED>(left[next], a, lda, k + 16);
      torch_pruner_right<NI, COLUMNS>(right[next], b, ldb, k + 16);
    }
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int j = 0; j < NI; ++j)
        torch_pruner_mma_block<BF16>(acc + (i * NI + j) * 4, left[now][i], right[now][j]);
    if (HELD == 1 && k + 16 < DEPTH) {
      torch_pruner_left<MI, TURNED>(left[0], a, lda, k + 16);
      torch_pruner_right<NI, COLUMNS>(right[0], b, ldb, k + 16);
    }
  }
}
"""
HELD_NAME = "torch_pruner_held"
HELD_SOURCE = r"""
// Two neighbours along the reduction, rounded, as tensor cores take them.
template <bool BF16> __device__ __forceinline__ unsigned torch_pruner_two(float low, float high) {
  unsigned both;
  if constexpr (BF16) {
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  } else {
    both = __pack_half2(__float2half_rn(low), __float2half_rn(high));
  }
  return both;
}

// The warp's 16 rows by NI blocks of columns, where A is what the warp has as sums of 16 rows by
// DEPTH columns: four of a thread's sums of two neighbouring blocks are its fragment of A.
template <int NI, int DEPTH, bool BF16, int HELD>
__device__ __forceinline__ void torch_pruner_held(float* acc, float* a, const void* tile_b,
                                                  int ldb) {
  const unsigned short* b = static_cast<const unsigned short*>(tile_b);
  unsigned right[HELD][NI][2];
  torch_pruner_right<NI, false>(right[0], b, ldb, 0);
#pragma unroll
  for (int k = 0; k < DEPTH; k += 16) {
    const int now = k / 16 % HELD, next = (k / 16 + 1) % HELD;
    if (HELD > 1 && k + 16 < DEPTH) torch_pruner_right<NI, false>(right[next], b, ldb, k + 16);
    unsigned left[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      left[i] = torch_pruner_two<BF16>(a[k / 2 + 2 * i], a[k / 2 + 2 * i + 1]);
#pragma unroll
    for (int j = 0; j < NI; ++j)
      torch_pruner_mma_block<BF16>(acc + j * 4, left, right[now][j]);
    if (HELD == 1 && k + 16 < DEPTH) torch_pruner_right<NI, false>(right[0], b, ldb, k + 16);
  }
}
"""


def fragments_held(rows: int, columns: int) -> int:
    """For how many steps of the reduction a warp keeps fragments: two where registers allow it."""
    fragments = rows // M * 4 + columns // N * 2
    return 2 if rows * columns // WARP + 2 * fragments <= ROOM else 1


def place(lane: Expr, number: Expr | int, columns: int) -> tuple[Expr, Expr]:
    """(row, column) in the warp's tile of sum ``number`` of a thread, for ``columns`` columns."""
    block, register = T.floordiv(imm(0) + number, SUMS), T.floormod(imm(0) + number, SUMS)
    across = columns // N
    row = T.floordiv(block, across) * M + T.floordiv(lane, 4) + T.floordiv(register, 2) * 8
    column = T.floormod(block, across) * N + T.floormod(lane, 4) * 2 + T.floormod(register, 2)
    return row, column


def multiply(
    acc: Callable[[Expr | int], Expr | int],
    sums: Buffer,
    a: tuple[Buffer, Expr, int],
    b: tuple[Buffer, Expr, int],
    shape: tuple[int, int, int],
    *,
    columns_first: bool,
    rows_turned: bool = False,
    fours: bool = False,
    tid: Expr,
    host: bool,
) -> Stmt:
    """Add the product of two tiles to the warp's sums.

    ``a`` and ``b``: shared memory, the tile's first element and the distance of its rows. ``shape``
    is the warp's (rows, columns, depth); ``acc(i)`` says where in ``sums`` a thread keeps sum i.
    ``columns_first``: b's lines are its columns. ``rows_turned``: a's are positions of the
    reduction. ``fours``: a line of b, whose elements are float32, is all columns of four positions
    of the reduction, which are neighbours.
    """
    rows, columns, depth = shape
    (left, a_first, lda), (right, b_first, ldb) = a, b
    if not host:
        bf16 = "true" if str(left.dtype) == "uint16" else "false"
        lines = "true" if columns_first else "false"
        turned = "true" if rows_turned else "false"
        blocks = f"{rows // M}, {columns // N}, {depth}"
        held = fragments_held(rows, columns)
        name = f"{NAME}<{blocks}, {bf16}, {lines}, {turned}, {held}>"
        if str(left.dtype) == "float32":
            kept = 2 if fours else int(columns_first)
            name = f"{tf32.NAME}<{blocks}, {kept}, {turned}>"
        places = T.address_of(sums[acc(0)]), T.address_of(left[a_first]), lda
        call = T.call_extern("void", name, *places, T.address_of(right[b_first]), ldb)
        return S.Evaluate(call)
    lane = T.floormod(tid, WARP)

    def one(i: Expr) -> Stmt:
        row, column = place(lane, i, columns)

        def step(k: Expr) -> Stmt:
            line = column * ldb + k if columns_first else k * ldb + column
            if fours:
                line = T.floordiv(k, 4) * ldb + column * 4 + T.floormod(k, 4)
            at = k * lda + row if rows_turned else row * lda + k
            x, y = _seen(left, a_first + at), _seen(right, b_first + line)
            return S.BufferStore(sums, sums[acc(i)] + x * y, [acc(i)])

        return loop(depth, step, name="k")

    return loop(rows * columns // WARP, one, UNROLLED, "sum")


def multiply_sums(
    acc: Callable[[Expr | int], Expr | int],
    sums: Buffer,
    a: Registers,
    b: tuple[Buffer, Expr, int],
    columns: int,
    depth: int,
    *,
    tid: Expr,
    host: bool,
) -> Stmt:
    """Add to the warp's sums the product of sums of its own, rounded, and of a tile.

    ``a``: 16 rows by ``depth`` columns of a warp, as ``place`` has them; no thread changes its own
    meanwhile. ``b``: rows of ``columns``, the first element and the distance of rows.
    """
    right, b_first, ldb = b
    bf16 = str(right.dtype) == "uint16"
    if not host:
        # In registers beside these: a's sums, and those of the result.
        taken = (M * (columns + depth)) // WARP + 2 * (columns // N * 2)
        held = 2 if taken <= ROOM else 1
        name = f"{HELD_NAME}<{columns // N}, {depth}, {'true' if bf16 else 'false'}, {held}>"
        places = T.address_of(sums[acc(0)]), T.address_of(a.buffer[a.at(tid, 0)])
        call = T.call_extern("void", name, *places, T.address_of(right[b_first]), ldb)
        return S.Evaluate(call)
    lane = T.floormod(tid, WARP)

    def one(i: Expr) -> Stmt:
        row, column = place(lane, i, columns)

        def step(k: Expr) -> Stmt:
            owner = tid - lane + T.floormod(row, 8) * 4 + T.floordiv(T.floormod(k, N), 2)
            number = T.floordiv(k, N) * SUMS + T.floordiv(row, 8) * 2 + T.floormod(k, 2)
            x = a.buffer[a.at(owner, number)]
            x = round_bfloat16(x) if bf16 else x.astype("float16").astype("float32")
            y = _seen(right, b_first + k * ldb + column)
            return S.BufferStore(sums, sums[acc(i)] + x * y, [acc(i)])

        return loop(depth, step, name="k")

    return loop(M * columns // WARP, one, UNROLLED, "sum")


def _seen(buf: Buffer, index: Expr) -> Expr:
    """An element as tensor cores take it, in float32."""
    if str(buf.dtype) == "float32":
        return tf32.rounded(buf[index])
    return load(buf, index).astype("float32")
