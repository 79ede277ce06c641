"""Copies of whole pieces of memory that one thread asks for (compute capability 9.0).

A piece arrives in shared memory without registers or further threads, and a barrier in shared
memory counts its bytes: who waits for the barrier's phase sees them. Phases have the parity of how
often the barrier was passed before. On the host a copy is done at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.codegen.tir.builders import Buffer, Expr, S, Stmt, T, loop, when
from torch_pruner.codegen.tir.reader import imm

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.gpu.grid import Grid

NAME = "torch_pruner_bulk"
SOURCE = r"""
__device__ __forceinline__ unsigned torch_pruner_bulk_at(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}
// COUNT barriers, each for one thread that arrives.
template <int COUNT>
__device__ __forceinline__ void torch_pruner_bulk_begin(void* barriers) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n"
                 :: "r"(torch_pruner_bulk_at(barriers) + 8 * i) : "memory");
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
template <int BYTES>
__device__ __forceinline__ void torch_pruner_bulk(void* to, const void* from, void* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
               :: "r"(torch_pruner_bulk_at(barrier)), "n"(BYTES) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1], %2, [%3];\n"
               :: "r"(torch_pruner_bulk_at(to)), "l"(from), "n"(BYTES),
                  "r"(torch_pruner_bulk_at(barrier)) : "memory");
}
__device__ __forceinline__ void torch_pruner_bulk_wait(void* barrier, int parity) {
  asm volatile("{\n"
               ".reg .pred arrived;\n"
               "again:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%0], %1;\n"
               "@arrived bra there;\n"
               "bra again;\n"
               "there:\n"
               "}\n" :: "r"(torch_pruner_bulk_at(barrier)), "r"(parity) : "memory");
}
"""


class Arrivals:
    """A barrier for each stage, and the copies that it counts."""

    def __init__(self, grid: Grid, stages: int) -> None:
        self._host, self._stages = grid.host, stages
        self._barriers = grid.shared(stages, "int64", "arrived")

    def begin(self, tid: Expr) -> Stmt:
        """By one thread, in a phase before any other use."""
        if self._host:
            return when(T.EQ(tid, imm(0)), S.BufferStore(self._barriers, T.const(0, "int64"), [0]))
        call = T.call_extern("void", f"{NAME}_begin<{self._stages}>", self._at(imm(0)))
        return when(T.EQ(tid, imm(0)), S.Evaluate(call))

    def copy(
        self, tid: Expr, turn: Expr, to: tuple[Buffer, Expr], what: tuple[Buffer, Expr], count: int
    ) -> Stmt:
        """``count`` elements, as they lie, for ``turn``; one thread asks for them."""
        (into, at), (source, first) = to, what
        if self._host:
            body = loop(count, lambda i: S.BufferStore(into, source[first + i], [at + i]), name="e")
            return when(T.EQ(tid, imm(0)), body)
        name = f"{NAME}<{count * np.dtype(str(into.dtype)).itemsize}>"
        places = T.address_of(into[at]), T.address_of(source[first]), self._at(turn)
        return when(T.EQ(tid, imm(0)), S.Evaluate(T.call_extern("void", name, *places)))

    def wait(self, turn: Expr) -> Stmt | None:
        """By every thread that reads what was copied for ``turn``."""
        if self._host:
            return None
        parity = T.floormod(T.floordiv(turn, self._stages), 2)
        return S.Evaluate(T.call_extern("void", f"{NAME}_wait", self._at(turn), parity))

    def _at(self, turn: Expr) -> Expr:
        return T.address_of(self._barriers[T.floormod(turn, self._stages)])
