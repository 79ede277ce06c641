"""Weights that are asked for before a kernel waits for the kernels in front of it.

A kernel that is launched early (``codegen.build.gpu.dependent``) reads nothing before it has
waited, weights included: a kernel in front may have packed or renewed them. But it may say that it
will want them. They then come to the second cache, which has whatever is written later, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import S, Stmt, T

if TYPE_CHECKING:
    from torch_pruner.codegen.tir.builders import Expr

NAME = "torch_pruner_early"
ENDED = f"{NAME}_ended"
SOURCE = r"""
// The line of a place in memory.
__device__ __forceinline__ void torch_pruner_early(const void* from) {
  asm volatile("prefetch.global.L2 [%0];\n" :: "l"(from));
}
// BYTES from there on: a multiple of sixteen, as the place is (compute capability 9.0).
template <int BYTES>
__device__ __forceinline__ void torch_pruner_early_piece(const void* from) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" :: "l"(from), "n"(BYTES));
}
// Where a kernel that is launched early waits; others wait for nothing.
__device__ __forceinline__ void torch_pruner_early_ended() {}
"""


def ask(place: Expr) -> Stmt:
    """For what lies around an element of a buffer, whose value ``place`` is."""
    return S.Evaluate(T.call_extern("void", NAME, T.address_of(place)))


def ask_piece(place: Expr, nbytes: int) -> Stmt:
    """For so many bytes, by sixteen and aligned to that, from an element on (capability 9.0)."""
    return S.Evaluate(T.call_extern("void", f"{NAME}_piece<{nbytes}>", T.address_of(place)))


def ended() -> Stmt:
    """All has been asked for: by all threads of a kernel, at one place of it, where it waits."""
    return S.Evaluate(T.call_extern("void", ENDED))
