"""Disjunctions of words, out of reach of the instruction selection that gets them wrong.

LLVM makes one instruction of ``(x & C) | (y & ~C)`` on processors with AVX-512 (``vpternlog``), in
whatever form it was written. LLVM 21 and 22, also that of TVM 0.27, give two of its forms each
other's truth table where a selection between the result and one of its own operands is folded in
and C lies in memory (llvm-project issue 157929, mended in July 2026 by pull request 209782). A
fence between the two keeps the selection apart. It is no instruction.
"""

from __future__ import annotations

from typing import Any

from tvm.ir.op import Op, register_op_attr

from torch_pruner.codegen.tir.builders import Call, Expr, T

FENCE = "torch_pruner.fence"
_FLOATS = {32: "float32", 64: "float64"}  # vectors of words of 8 and 16 bits have no such form


def _fence(call: Call) -> Expr:
    """LLVM's fence takes floats."""
    words: Any = call.ty.dtype  # with lanes, a dtype of tvm_ffi
    lanes = f"x{words.lanes}" if words.lanes > 1 else ""
    floats = _FLOATS[words.bits] + lanes
    given = T.reinterpret(floats, call.args[0])
    return T.reinterpret(str(words), T.call_llvm_intrin(floats, "llvm.arithmetic.fence", given))


register_op_attr(FENCE, "TCallEffectKind", T.CallEffectKind.Pure.value)
register_op_attr(FENCE, "TVectorizable", True)
register_op_attr(FENCE, "TScriptPrinterName", "fence")
T.register_intrin_lowering(FENCE, target="llvm", f=_fence)
T.register_intrin_lowering(FENCE, target="cuda", f=lambda call: call.args[0])


def bitwise_or(x: Expr, y: Expr, bits: int) -> Expr:
    """``x | y`` of words of ``bits``."""
    return _fenced(T.bitwise_or(x, y), bits)


def bitwise_xor(x: Expr, y: Expr, bits: int) -> Expr:
    """``x ^ y`` of words of ``bits``."""
    return _fenced(T.bitwise_xor(x, y), bits)


def _fenced(value: Expr, bits: int) -> Expr:
    return T.call_intrin(value.ty, Op.get(FENCE), value) if bits in _FLOATS else value
