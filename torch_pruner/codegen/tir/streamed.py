"""Results that are more than the last cache holds are written past the caches, line by line.

A store to a line that no cache holds reads the line first. Where a result is so large that its
beginning has left the caches before anybody reads it, that is for nothing, and so is what it drives
out: a stored line that goes to memory by itself saves a third of what is moved. Only whole, aligned
vectors of a line can: other stores stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tvm_ffi

from torch_pruner.codegen.tir.builders import (
    Buffer,
    Expr,
    PrimFunc,
    S,
    Stmt,
    T,
    Visitor,
    importing,
    intrinsic,
    is_const,
    parallel_inside,
    seq,
    tvm,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEY = "torch_pruner.streamed"
_NAME, _LANES = "torch_pruner_streamed", 16  # of float32: 64 bytes, a line
_IR = f"""
define i32 @{_NAME}(ptr %to, <{_LANES} x float> %value) alwaysinline {{
  store <{_LANES} x float> %value, ptr %to, align {4 * _LANES}, !nontemporal !0
  ret i32 0
}}
!0 = !{{i32 1}}
"""


def streamed(body: Stmt, results: Sequence[Buffer]) -> Stmt:
    """``body``, a kernel's, whose stores to those of ``results`` go past the caches that it reads
    nothing of."""
    read: set[str] = set()

    def load(found: Any, visitor: Visitor) -> object:
        read.add(found.source.name)
        return visitor.default_visit(found)

    tvm_ffi.structural_visit(body, [(tvm.ir.expr.TensorLoad, load)])
    for result in results:
        if result.name not in read and str(result.dtype) == "float32":
            name = tvm.ir.StringImm(result.name)
            body = S.AttrStmt(T.const(0, "int32"), _KEY, name, body)
    return body


def _rewritten(func: PrimFunc, mod: object, context: object) -> PrimFunc:
    changed = tvm_ffi.structural_map(func.body, (S.AttrStmt, _marked))
    return func if changed.same_as(func.body) else func.with_body(changed)


def _marked(around: S.AttrStmt) -> Stmt:
    if around.attr_key != _KEY:
        return around
    name, count = str(around.value.value), 0

    def stored(store: S.BufferStore) -> Stmt:
        nonlocal count
        if store.buffer.name != name or (first := _line_of(store)) is None:
            return store
        count += 1
        at = T.address_of(store.buffer[first])
        return S.Evaluate(T.call_extern("int32", _NAME, at, store.value))

    body: Stmt = tvm_ffi.structural_map(around.body, (S.BufferStore, stored))
    # Threads that begin inside would end without the fence.
    if not count or parallel_inside(body):
        return around.body
    # Such stores are not in order with others: whoever is told of this task's end has to see them.
    return importing(_IR, seq([body, intrinsic("llvm.x86.sse.sfence")]))


def _line_of(store: S.BufferStore) -> Expr | None:
    """The first element of the line that a store writes, None where it may write anything else."""
    (index,) = store.indices
    if not (isinstance(index, T.Ramp) and is_const(index.lanes, _LANES)):
        return None
    if not is_const(index.stride, 1):
        return None
    known = tvm.sym.Analyzer().modular_set(index.base)
    return index.base if known.coeff % _LANES == 0 == known.base % _LANES else None


StreamedStores = tvm.tirx.transform.prim_func_pass(
    _rewritten, opt_level=0, name="torch_pruner.StreamedStores"
)
