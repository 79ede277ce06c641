"""Blocks that run at once and read each other's shared memory: sums that they have parts of.

A cluster (compute capability 9.0) is of up to eight blocks whose numbers follow each other. Each
leaves its sums in its own shared memory; when all have, each adds up its share of them, read from
all ("Distributed Shared Memory", CUDA C++ Programming Guide; PTX ISA, ``mapa``,
``barrier.cluster``). A block stays until the others have read what it left.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import Buffer, Expr, S, Stmt, T, imm

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.gpu.grid import Registers

NAME = "torch_pruner_cluster"
FOUR = 4  # sums that are left, and read, at once
SOURCE = r"""
// Leaves a thread's sums by fours: those of all threads, then the next four of all.
template <int COUNT, int THREADS>
__device__ __forceinline__ void torch_pruner_cluster_leave(void* shared, const float* sums) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + threadIdx.x * 16;
#pragma unroll
  for (int i = 0; i < COUNT; i += 4)
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n"
                 :: "r"(at + i * THREADS * 4), "f"(sums[i]), "f"(sums[i + 1]), "f"(sums[i + 2]),
                    "f"(sums[i + 3]) : "memory");
}
// What all threads of all blocks wrote before, all read after it.
__device__ __forceinline__ void torch_pruner_cluster_meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}
// Adds up four sums of this thread's place, of all BLOCKS in their order.
template <int BLOCKS, int THREADS>
__device__ __forceinline__ void torch_pruner_cluster_add(float* whole, const void* shared,
                                                         int four) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(shared)) +
                      (four * THREADS + threadIdx.x) * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) whole[i] = 0.0f;
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    unsigned there;
    float x, y, z, w;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(at), "r"(block));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "r"(there) : "memory");
    whole[0] += x, whole[1] += y, whole[2] += z, whole[3] += w;
  }
}
"""
_KERNEL = re.compile(r'(?=^extern "C" __global__)', re.MULTILINE)
_HEAD = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(?P<name>\w+)\(')
_BLOCKS = re.compile(rf"{NAME}_add<(\d+),")


def leave(sums: Registers, into: Buffer, threads: int, tid: Expr) -> Stmt:
    """Leave a thread's sums, the number of which ``FOUR`` divides, in its block's shared memory."""
    name = f"{NAME}_leave<{sums.count}, {threads}>"
    given = T.address_of(into[imm(0)]), T.address_of(sums.buffer[sums.at(tid, 0)])
    return S.Evaluate(T.call_extern("void", name, *given))


def meet() -> Stmt:
    """Wait for all threads of all blocks of the cluster."""
    return S.Evaluate(T.call_extern("void", f"{NAME}_meet"))


def add(whole: Buffer, left: Buffer, four: Expr, blocks: int, threads: int) -> Stmt:
    """``whole``: sums ``FOUR`` times ``four`` and after it of this thread, of all ``blocks``."""
    given = T.address_of(whole[imm(0)]), T.address_of(left[imm(0)]), four
    return S.Evaluate(T.call_extern("void", f"{NAME}_add<{blocks}, {threads}>", *given))


def launched_together(code: str) -> str:
    """CUDA C in which kernels that add up what blocks left say how many blocks a cluster has."""
    parts = _KERNEL.split(code)
    sizes: dict[str, str] = {}
    for part in parts:
        if (head := _HEAD.match(part)) and (found := _BLOCKS.search(part)):
            sizes[head["name"]] = found[1]
    for n, part in enumerate(parts):
        if (head := _HEAD.match(part)) and head["name"] in sizes:  # declarations, too
            dims = f"__cluster_dims__({sizes[head['name']]}, 1, 1) "
            parts[n] = part.replace("__global__ ", f"__global__ {dims}", 1)
    return "".join(parts)
