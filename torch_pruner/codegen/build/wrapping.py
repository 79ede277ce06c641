"""Loops of which LLVM's loop vectorizer makes wrong code.

It takes neighbouring iterations to read neighbours where a position wraps around at a power of two
(``i % 4``, which it sees as a number of two bits), behind a condition at least: of
``if i < 8: y[i] = x[i % 4] * ...`` it read ``x[0:8]`` (LLVM 22, processors with AVX-512;
docs/tvm-facts.md). Modules with such a loop are built without it.
"""

from __future__ import annotations

from typing import Protocol

import tvm_ffi

from torch_pruner.codegen.tir.builders import VECTORIZED, Expr, IRModule, S, Stmt, T


class _Visitor(Protocol):
    """What goes through a statement, until it is interrupted."""

    def default_visit(self, node: Expr | Stmt) -> tvm_ffi.VisitInterrupt | None: ...


def wraps_around(module: IRModule) -> bool:
    """Whether a loop without vectors reads or writes where a position wraps around within it."""
    return any(
        tvm_ffi.structural_visit(func.body, [(S.For, _loop)]) is not None
        for func in module.functions.values()
    )


def _loop(loop: S.For, visitor: _Visitor) -> tvm_ffi.VisitInterrupt | None:
    if not _has_vectors(loop) and _wraps(loop):
        return tvm_ffi.VisitInterrupt(1)
    return visitor.default_visit(loop)


def _has_vectors(loop: S.For) -> bool:
    """LLVM leaves loops around vectors alone."""

    def inner(each: S.For, visitor: _Visitor) -> tvm_ffi.VisitInterrupt | None:
        if each.kind == VECTORIZED:
            return tvm_ffi.VisitInterrupt(1)
        return visitor.default_visit(each)

    return tvm_ffi.structural_visit(loop, [(S.For, inner)]) is not None


def _wraps(loop: S.For) -> bool:
    extent = int(loop.extent) if isinstance(loop.extent, T.IntImm) else None

    def remainder(node: T.FloorMod, visitor: _Visitor) -> tvm_ffi.VisitInterrupt | None:
        if isinstance(node.b, T.IntImm):
            period = int(node.b)
            if period > 1 and not period & (period - 1) and (extent is None or period < extent):
                return tvm_ffi.VisitInterrupt(1)
        return visitor.default_visit(node)

    return tvm_ffi.structural_visit(loop.body, [(T.FloorMod, remainder)]) is not None
