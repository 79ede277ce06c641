"""Copies from memory to shared memory that a block does not wait for (compute capability 8.0).

Sixteen bytes per instruction, past the registers; bytes that do not exist become zeros. Copies are
committed in groups, one per turn of the reduction, and waited for by how many newer groups may
still be on their way. On the host a copy is done at once, which is one of the orders that the
device may take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import UNROLLED, Buffer, Expr, S, Stmt, T, loop

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES = 16
NAME = "torch_pruner_copy"
SOURCE = r"""
__device__ __forceinline__ void torch_pruner_copy(void* to, const void* from, bool exists) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
               :: "r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void torch_pruner_copy_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
template <int NEWER>
__device__ __forceinline__ void torch_pruner_copy_wait() {
  asm volatile("cp.async.wait_group %0;\n" :: "n"(NEWER) : "memory");
}
"""


def copy(
    to: tuple[Buffer, Expr],
    value: Callable[[Expr], Expr],
    width: int,
    guards: list[Expr],
    host: bool,
) -> Stmt:
    """``width`` neighbours, sixteen bytes together; zeros where one of ``guards`` does not hold.

    ``value(v)`` is element v as it lies in memory, and all lie next to each other.
    """
    buf, at = to
    exists = T.all(*guards) if guards else T.const(True, "bool")
    if not host:
        first = T.address_of(value(T.const(0, "int32")))
        return S.Evaluate(T.call_extern("void", NAME, T.address_of(buf[at]), first, exists))
    moved = loop(width, lambda v: S.BufferStore(buf, value(v), [at + v]), UNROLLED, "v")
    if not guards:
        return moved
    zero = T.const(0, str(buf.dtype))
    cleared = loop(width, lambda v: S.BufferStore(buf, zero, [at + v]), UNROLLED, "v")
    return S.IfThenElse(exists, moved, cleared)


def commit(*, host: bool) -> Stmt | None:
    """End a group of copies."""
    return None if host else S.Evaluate(T.call_extern("void", f"{NAME}_commit"))


def wait(newer: int, *, host: bool) -> Stmt | None:
    """Wait for all groups but the ``newer`` last ones."""
    return None if host else S.Evaluate(T.call_extern("void", f"{NAME}_wait<{newer}>"))
