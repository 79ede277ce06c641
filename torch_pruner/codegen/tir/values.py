"""Elements in memory and the values computed on: the two differ for bfloat16.

bfloat16 lives in memory as uint16 and is computed on as float32: TVM's own legalisation does not
reach private functions. No graph has a uint16 of its own, so the element type of a buffer tells.
"""

from __future__ import annotations

from torch_pruner.codegen.tir.builders import Buffer, Call, Expr, S, Stmt, T, tvm
from torch_pruner.codegen.tir.vmath import Bindings


def value_dtype(dtype: str) -> str:
    """The dtype in which expressions of ``dtype`` are computed."""
    return "float32" if dtype == "bfloat16" else dtype


def element_dtype(buf: Buffer) -> str:
    """What the elements of a buffer are: two bytes without a sign are a bfloat16."""
    return "bfloat16" if str(buf.dtype) == "uint16" else str(buf.dtype)


def round_bfloat16(value: Expr) -> Expr:
    """A float32 rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    bind = Bindings()
    bits = _bits(bind, value)
    return bind.close(T.reinterpret("float32", T.shift_left(bits, T.const(16, "uint32"))))


def load(buf: Buffer, index: Expr | int) -> Expr:
    """``buf[index]`` as a value to compute on."""
    raw = buf[index]
    if str(buf.dtype) != "uint16":
        return raw
    return T.reinterpret("float32", T.shift_left(raw.astype("uint32"), T.const(16, "uint32")))


def store(buf: Buffer, index: Expr | int, value: Expr) -> Stmt:
    """``buf[index] = value``."""
    if str(buf.dtype) == "uint16":
        bind = Bindings()
        value = bind.close(_bits(bind, value).astype("uint16"))
    return S.BufferStore(buf, value, [index])


def bits(value: Expr) -> Expr:
    """The bits of a float32 rounded to bfloat16, as uint32."""
    bind = Bindings()
    return bind.close(_bits(bind, value))


def held_bits(buf: Buffer, index: Expr) -> Expr:
    """The bits of a bfloat16 in memory, as uint32."""
    return buf[index].astype("uint32")


def _narrow(value: Expr) -> Expr | None:
    """The bits of a value that was read or rounded as bfloat16 just now, whatever they are."""
    if not (isinstance(value, Call) and value.op.same_as(_REINTERPRET)):
        return None
    raw = value.args[0]
    if not isinstance(raw, T.LShift) or str(raw.ty.dtype) != "uint32":
        return None
    return raw.a if isinstance(raw.b, T.IntImm) and int(raw.b) == 16 else None


def _bits(bind: Bindings, value: Expr) -> Expr:
    value = bind.hoist(value)
    if (held := _narrow(value)) is not None:
        return held
    value = bind(value)
    raw = bind(T.reinterpret("uint32", value))
    odd = T.bitwise_and(T.shift_right(raw, T.const(16, "uint32")), T.const(1, "uint32"))
    rounded = T.shift_right(raw + odd + T.const(0x7FFF, "uint32"), T.const(16, "uint32"))
    # By its bits: isnan of a vector becomes a branch for every lane.
    nan = T.bitwise_and(raw, T.const(0x7FFFFFFF, "uint32")) > T.const(0x7F800000, "uint32")
    return T.Select(nan, T.const(0x7FC0, "uint32"), rounded)


_REINTERPRET = tvm.ir.Op.get("tirx.reinterpret")
