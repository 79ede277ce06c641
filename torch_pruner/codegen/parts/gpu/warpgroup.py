"""Products of tiles in shared memory by groups of four warps, which go on while tensor cores work.

``wgmma.mma_async`` (compute capability 9.0a): 64 rows by up to 256 columns by 16 positions of the
reduction, both operands from shared memory, float32 sums in the registers of 128 threads. Of each
16 by 8 block of the result, which has the rows of one warp, a thread has the sums that it has of
``mma.m16n8k16`` (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16").

A tile is kept in one of three ways ("Shared Memory Matrix Layout", "Matrix Descriptor"), in pieces
of eight neighbours, sixteen bytes:

* ``ALONG``: lines of 64 positions of the reduction, 128 bytes, with the pieces of line i at place
  (piece ^ i % 8); deeper tiles are one such tile after another;
* ``ACROSS``: the same with positions of the reduction for lines, of 64 rows or columns each;
* ``PIECES``: eight positions of the reduction of a line after those of the line before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.grid import WARP
from torch_pruner.codegen.parts.gpu.warpgroup_shapes import (
    ACROSS,
    ALONG,
    COLUMNS,
    LINE,
    PIECE,
    THREADS,
    M,
)
from torch_pruner.codegen.tir.builders import UNROLLED, Buffer, Expr, S, Stmt, T, loop
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.codegen.tir.values import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.parts.gpu.grid import Registers

ALIGNED = 1024  # bytes, of a tile
NAME = "torch_pruner_wgmma"


def _block(columns: int, kind: str) -> str:
    """The instruction for so many columns."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    held = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    return (
        f'    asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} '
        f'{{{sums}}}, %{count}, %{count + 1}, 1, 1, 1, %{count + 2}, %{count + 3};\\n"\n'
        f'                 : {held}\n                 : "l"(a), "l"(b), "n"(TA), "n"(TB)'
        ' : "memory");\n'
    )


def _blocks() -> str:
    """A function for every number of columns; ``TA`` and ``TB``: tiles are kept ``ACROSS``."""
    cases = [
        f"  if constexpr (N == {n} && {'' if kind == 'bf16' else '!'}BF16)\n{_block(n, kind)}"
        for n in COLUMNS
        for kind in ("f16", "bf16")
    ]
    return (
        "template <int N, bool BF16, int TA, int TB>\n"
        "__device__ __forceinline__ void torch_pruner_wgmma_block(float* c, unsigned long long a,\n"
        "                                                         unsigned long long b) {\n"
        + "".join(cases)
        + "}\n"
    )


SOURCE = (
    _blocks()
    + r"""
// Where a tile begins, how it is kept, and the distance of its parts, in bytes: of 64 lines where
// KEPT is 1, of pieces along the reduction where it is 2.
template <int KEPT, int APART>
__device__ __forceinline__ unsigned long long torch_pruner_wgmma_tile(unsigned at) {
  constexpr unsigned long long swizzled = KEPT == 2 ? 0ull : 1ull << 62;
  constexpr unsigned long long eight = KEPT == 2 ? 128 : 1024;  // of eight lines and the next eight
  constexpr unsigned long long apart = KEPT == 0 ? 16 : APART;  // not read where it is 0
  return static_cast<unsigned long long>((at & 0x3FFFF) >> 4) | (apart >> 4) << 16 |
         (eight >> 4) << 32 | swizzled;
}
// Bytes from the beginning of a tile to where positions k to k + 15 of the reduction begin.
template <int KEPT, int LINES>
__device__ __forceinline__ constexpr int torch_pruner_wgmma_step(int k) {
  return KEPT == 0 ? k / 64 * LINES * 128 + k % 64 * 2 : KEPT == 1 ? k * 128 : k * LINES * 2;
}
// Sums are in registers that the compiler must neither move nor copy meanwhile.
template <int COUNT>
__device__ __forceinline__ void torch_pruner_wgmma_hold(float* acc) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}
// What threads have written to shared memory, tensor cores see after a barrier.
__device__ __forceinline__ void torch_pruner_wgmma_shown() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
// Begins the products of a warpgroup's MI times 64 rows by N columns, DEPTH positions deep.
template <int MI, int N, int DEPTH, bool BF16, int A, int B, int ROWS>
__device__ __forceinline__ void torch_pruner_wgmma(float* acc, const void* tile_a,
                                                   const void* tile_b) {
  const unsigned a = static_cast<unsigned>(__cvta_generic_to_shared(tile_a));
  const unsigned b = static_cast<unsigned>(__cvta_generic_to_shared(tile_b));
  torch_pruner_wgmma_hold<MI * N / 2>(acc);
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
  for (int k = 0; k < DEPTH; k += 16)
#pragma unroll
    for (int i = 0; i < MI; ++i)
      torch_pruner_wgmma_block<N, BF16, A == 1, B == 1>(
          acc + i * (N / 2),
          torch_pruner_wgmma_tile<A, DEPTH * 128>(a + i * (A == 1 ? DEPTH : 64) * 128 +
                                                  torch_pruner_wgmma_step<A, ROWS>(k)),
          torch_pruner_wgmma_tile<B, B == 1 ? DEPTH * 128 : N * 16>(
              b + torch_pruner_wgmma_step<B, N>(k)));
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
  torch_pruner_wgmma_hold<MI * N / 2>(acc);
}
// Gives a thread four neighbouring columns of a row where it had two of one block and two of the
// next: lanes 2 i and 2 i + 1 exchange what the other is to have.
template <int COUNT>
__device__ __forceinline__ void torch_pruner_wgmma_gather(float* acc) {
  const bool odd = threadIdx.x & 1;
#pragma unroll
  for (int i = 0; i < COUNT; i += 8) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float got = __shfl_xor_sync(0xffffffffu, odd ? acc[i + j] : acc[i + 4 + j], 1);
      acc[i + j] = odd ? got : acc[i + j];
      acc[i + 4 + j] = odd ? acc[i + 4 + j] : got;
    }
    const float low = acc[i + 2], high = acc[i + 3];
    acc[i + 2] = acc[i + 4];
    acc[i + 3] = acc[i + 5];
    acc[i + 4] = low;
    acc[i + 5] = high;
  }
}
// Waits for all products but the NEWER ones that began last.
template <int NEWER>
__device__ __forceinline__ void torch_pruner_wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" :: "n"(NEWER) : "memory");
}
"""
)


def kept(kind: int, lines: int, depth: int) -> Callable[[Expr, Expr], Expr]:
    """Where element (line, position) of a tile of so many lines and positions is kept."""

    def along(line: Expr, k: Expr, lines: int) -> Expr:
        piece, rest = T.floordiv(T.floormod(k, LINE), PIECE), T.floormod(k, PIECE)
        place = T.bitwise_xor(piece, T.floormod(line, PIECE)) * PIECE + rest
        return T.floordiv(k, LINE) * (lines * LINE) + line * LINE + place

    if kind == ALONG:
        return lambda line, k: along(line, k, lines)
    if kind == ACROSS:
        return lambda line, k: along(k, line, depth)
    return lambda line, k: (
        T.floordiv(k, PIECE) * (lines * PIECE) + line * PIECE + T.floormod(k, PIECE)
    )


def place(tid: Expr, number: Expr | int, columns: int) -> tuple[Expr, Expr]:
    """(row, column) in a warpgroup's tile of sum ``number`` of a thread, after ``gather``.

    Sums 4 i to 4 i + 3 are neighbours in a row.
    """
    number = imm(0) + number
    pair, register = T.floordiv(number, 8), T.floormod(number, 8)
    across = columns // 16
    warp, lane = T.floordiv(T.floormod(tid, THREADS), WARP), T.floormod(tid, WARP)
    row = T.floordiv(pair, across) * M + warp * 16 + T.floordiv(lane, 4)
    column = T.floormod(pair, across) * 16 + T.floormod(lane, 2) * 8
    column = column + T.floordiv(T.floormod(lane, 4), 2) * 4 + T.floormod(register, 4)
    return row + T.floordiv(register, 4) * 8, column


def hold(sums: Registers, tid: Expr, *, host: bool) -> Stmt | None:
    """Where sums are complete, and before the first product: they are in their registers."""
    if host:
        return None
    at = T.address_of(sums.buffer[sums.at(tid, 0)])
    return S.Evaluate(T.call_extern("void", f"{NAME}_hold<{sums.count}>", at))


def shown(*, host: bool) -> Stmt | None:
    """What this thread has written to shared memory is there for tensor cores, after a barrier."""
    return None if host else S.Evaluate(T.call_extern("void", f"{NAME}_shown"))


def wait(newer: int, *, host: bool) -> Stmt | None:
    """Wait for all products but those of the ``newer`` last calls of ``multiply``."""
    return None if host else S.Evaluate(T.call_extern("void", f"{NAME}_wait<{newer}>"))


def gather(sums: Registers, tid: Expr, *, host: bool) -> Stmt | None:
    """Sums that are complete become those that ``place`` says."""
    if host:
        return None
    at = T.address_of(sums.buffer[sums.at(tid, 0)])
    return S.Evaluate(T.call_extern("void", f"{NAME}_gather<{sums.count}>", at))


def multiply(
    sums: Registers,
    a: tuple[Buffer, Expr, int],
    b: tuple[Buffer, Expr, int],
    shape: tuple[int, int, int, int],
    *,
    tid: Expr,
    host: bool,
) -> Stmt:
    """Begin to add the product of two tiles to a warpgroup's sums.

    ``a`` and ``b``: shared memory, where the tile begins (a's: of the block), and how it is kept.
    ``shape``: rows of the block, rows of the warpgroup, columns, positions of the reduction.
    """
    (left, a_first, a_kind), (right, b_first, b_kind) = a, b
    block, rows, columns, depth = shape
    group = T.floordiv(tid, THREADS)
    if not host:
        bf16 = "true" if str(left.dtype) == "uint16" else "false"
        name = f"{NAME}<{rows // M}, {columns}, {depth}, {bf16}, {a_kind}, {b_kind}, {block}>"
        first = a_first + group * (rows * (depth if a_kind == ACROSS else LINE))
        call = T.call_extern(
            "void", name, T.address_of(sums.buffer[sums.at(tid, 0)]), T.address_of(left[first]),
            T.address_of(right[b_first]),
        )  # fmt: skip
        return S.Evaluate(call)
    a_at, b_at = kept(a_kind, block, depth), kept(b_kind, columns, depth)

    def one(i: Expr) -> Stmt:
        row, column = place(tid, i, columns)

        def step(k: Expr) -> Stmt:
            x = load(left, a_first + a_at(group * rows + row, k)).astype("float32")
            y = load(right, b_first + b_at(column, k)).astype("float32")
            at = sums.at(tid, i)
            return S.BufferStore(sums.buffer, sums.buffer[at] + x * y, [at])

        return loop(depth, step, name="k")

    return loop(sums.count, one, UNROLLED, "sum")
