"""The TIR expression of every pointwise operator of the graph IR.

In: operand expressions and the result dtype. Out: one expression of that dtype that can stand in a
vectorised loop, keeps NaN and infinity as eager PyTorch does, and never traps: no division by zero,
no conversion of an out-of-range float. ``float16`` and ``bfloat16`` are computed in float32 and
rounded once per call.

TVM's simplifier treats floats as reals and signed integers as unbounded, so operands are bound to
variables (hiding ``x - x`` and ``x != x`` from it), integers wrap in unsigned arithmetic
(``integer.py``), and predicates combine with bitwise operators (``not (x < y)`` would become
``y <= x``).
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir import approximate, binary, circular, double, integer, vmath
from torch_pruner.codegen.tir.arithmetic import (
    divide,
    is_constant,
    is_number,
    is_zero,
    plus,
    plus_zero,
    times,
    zero_as,
)
from torch_pruner.codegen.tir.builders import Expr, T
from torch_pruner.codegen.tir.predicates import is_nan, negated, opaque
from torch_pruner.codegen.tir.vmath import Bindings
from torch_pruner.graph.ops import COMPARISONS, FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_PREDICATES = COMPARISONS | {
    "isnan",
    "isinf",
    "logical_not",
    "logical_and",
    "logical_or",
    "logical_xor",
}
# No operators of graphs: exp of what is known not to exceed 0, exp to which 1 is added.
EXP_AT_MOST_ONE, EXP_BESIDE_ONE = "exp_at_most_one", "exp_beside_one"
_FAST = "fast_"  # nor these: what may be less exact, by ``approximate``
_POWERS = frozenset(("exp", EXP_AT_MOST_ONE, EXP_BESIDE_ONE, _FAST + "exp"))
_POWERS |= {_FAST + EXP_AT_MOST_ONE, _FAST + EXP_BESIDE_ONE}
_by_hardware: ContextVar[bool] = ContextVar("by_hardware", default=False)
_ROUNDING = {"floor": T.floor, "ceil": T.ceil, "trunc": T.trunc, "round": T.nearbyint}
_VECTOR: dict[str, Callable[[Bindings, Expr], Expr]] = {
    "exp": vmath.exp, "exp2": vmath.exp2, "expm1": vmath.expm1, "log": vmath.log,
    "log2": vmath.log2, "log10": vmath.log10, "log1p": vmath.log1p, "tanh": vmath.tanh,
    "sigmoid": vmath.sigmoid, "erf": vmath.erf, "erfc": vmath.erfc, "sin": circular.sin,
    "cos": circular.cos, "tan": circular.tan, "asin": circular.asin, "acos": circular.acos,
    "atan": circular.atan, "sinh": vmath.sinh, "cosh": vmath.cosh, "atanh": vmath.atanh,
    "asinh": vmath.asinh, "acosh": vmath.acosh,
    EXP_AT_MOST_ONE: vmath.exp_at_most_one,
    EXP_BESIDE_ONE: vmath.exp_beside_one,
}  # fmt: skip
_VECTOR |= {
    _FAST + "exp": approximate.exp, _FAST + EXP_BESIDE_ONE: approximate.exp,
    _FAST + EXP_AT_MOST_ONE: approximate.exp_at_most_one, _FAST + "erf": approximate.erf,
    _FAST + "sigmoid": approximate.sigmoid, _FAST + "tanh": approximate.tanh,
}  # fmt: skip
_DOUBLE: dict[str, Callable[[Bindings, Expr], Expr]] = {
    "exp": double.exp, "exp2": double.exp2, "expm1": double.expm1, "log": double.log,
    "log2": double.log2, "log10": double.log10, "log1p": double.log1p, "tanh": double.tanh,
    "sigmoid": double.sigmoid, "sin": double.sin, "cos": double.cos, "tan": double.tan,
}  # fmt: skip
_LIBM = frozenset(
    (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
        "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc",
    )
)  # fmt: skip
_COMPARE = {"eq": T.EQ, "lt": T.LT, "le": T.LE, "gt": T.GT, "ge": T.GE}


@contextmanager
def powers_by_hardware() -> Iterator[None]:
    """Inside, e**x of float32 is the target's own, and no polynomial: GPUs have an instruction,
    whose result is off by 2**-22 and, for it multiplies by log2 e first, by |x| 2**-24."""
    token = _by_hardware.set(True)
    try:
        yield
    finally:
        _by_hardware.reset(token)


def apply(op: str, args: Sequence[Expr], dtype: str, bindings: Bindings | None = None) -> Expr:
    """``op`` of ``args``, rounded to ``dtype``.

    Operands of another dtype are converted to it first, except those of a predicate, which are
    converted to the first operand's dtype, and the condition of ``where``. With ``bindings``, the
    result refers to variables in it; without, it is closed.
    """
    b = Bindings() if bindings is None else bindings
    result = _apply(b, op, [b.hoist(a) for a in args], dtype)
    return b.close(result) if bindings is None else result


def approximated(op: str) -> str:
    """What stands for ``op`` where its result may be less exact: itself if nothing is cheaper."""
    return fast if (fast := _FAST + op) in _VECTOR else op


def cast(x: Expr, dtype: str) -> Expr:
    """Conversion as ``Tensor.to`` on x86: floats truncate, out of range is the lowest integer."""
    return apply("cast", [x], dtype)


def _apply(b: Bindings, op: str, args: Sequence[Expr], dtype: str) -> Expr:
    if op == "cast":
        return _cast(b, args[0], dtype)
    if op == "where":
        condition, *choices = (
            _cast(b, a, t) for a, t in zip(args, ("bool", dtype, dtype), strict=True)
        )
        zeros = [c for c in choices if is_zero(c)]
        if len(zeros) == len(choices):  # TVM takes zeros of both signs for one value
            signs = (T.const(math.copysign(1.0, c.value), dtype) for c in zeros)
            return zero_as(T.Select(condition, *signs), dtype)
        if dtype == "bfloat16":
            choices = [T.reinterpret("uint16", c) for c in choices]
        chosen = T.Select(condition, *choices)
        return T.reinterpret(dtype, chosen) if dtype == "bfloat16" else chosen
    operand = _dtype(args[0]) if op in _PREDICATES else dtype
    compute = "float32" if operand in ("float16", "bfloat16") else operand
    operands = [b(_cast(b, a, compute)) for a in args]
    if op in _PREDICATES:
        result = _predicate(op, operands, compute)
    elif compute in FLOATS:
        result = _float(b, op, operands, compute)
    elif compute == "bool":
        result = _bool(op, operands)
    else:
        result = integer.apply(b, op, operands, compute)
    return _cast(b, result, dtype)


def _cast(b: Bindings, x: Expr, dtype: str) -> Expr:
    source = _dtype(x)
    if source == dtype:
        return x
    if source == "bfloat16":
        bits = T.Cast("uint32", T.reinterpret("uint16", x))
        wide = T.reinterpret("float32", T.shift_left(bits, T.const(16, "uint32")))
        return _cast(b, wide, dtype)
    if source == "float16":
        return _cast(b, T.Cast("float32", x), dtype)
    if dtype == "bool":
        return negated(T.EQ(x, T.const(0, source)))  # TVM's "!=" is false for NaN
    if source == "bool":
        return T.Select(x, T.const(1, dtype), T.const(0, dtype))
    if dtype == "bfloat16":
        return _round_to_bfloat16(b, b(_cast(b, x, "float32")))
    if dtype == "float16":
        return T.Cast("float16", _cast(b, x, "float32"))
    if source in FLOATS and dtype not in FLOATS:
        return _truncate(b(x), source, dtype)
    return T.Cast(dtype, x)


def _dtype(x: Expr) -> str:
    return str(x.ty.dtype)


def _truncate(x: Expr, source: str, dtype: str) -> Expr:
    """Through int32 or int64, of which narrow integers keep the low bits."""
    wide = "int64" if dtype == "int64" else "int32"
    bound = 2.0 ** (63 if wide == "int64" else 31)
    inside = T.bitwise_and(x >= T.const(-bound, source), x < T.const(bound, source))
    whole = T.Cast(wide, T.Select(inside, x, T.const(0.0, source)))
    lowest = T.const(-(2**63 if wide == "int64" else 2**31), wide)
    result = T.Select(inside, whole, lowest)
    return result if wide == dtype else T.Cast(dtype, result)


def _round_to_bfloat16(b: Bindings, x: Expr) -> Expr:
    """Nearest even, on the bits: TVM drops the rounding of a cast to bfloat16 that is cast back,
    and its own rounding copies the ``Let``s of the value."""
    bits = b(T.reinterpret("uint32", x))
    sixteen = T.const(16, "uint32")
    odd = T.bitwise_and(T.shift_right(bits, sixteen), T.const(1, "uint32"))
    rounded = T.shift_right(bits + (odd + T.const(0x7FFF, "uint32")), sixteen)
    upper = T.Select(T.isnan(x), T.const(0x7FC0, "uint32"), rounded)
    return T.reinterpret("bfloat16", T.Cast("uint16", upper))


def _predicate(op: str, args: Sequence[Expr], dtype: str) -> Expr:
    if op in ("isnan", "isinf"):
        if dtype not in FLOATS:
            return T.const(False, "bool")
        x = args[0]
        return is_nan(x, dtype) if op == "isnan" else T.EQ(T.abs(x), T.const(math.inf, dtype))
    if op in COMPARISONS:
        left, right = (cast(a, "int32") if dtype == "bool" else a for a in args)
        if dtype in FLOATS and left.same_as(right):
            right = opaque(right, dtype)
        return negated(T.EQ(left, right)) if op == "ne" else _COMPARE[op](left, right)
    truths = [cast(a, "bool") for a in args]
    if op == "logical_not":
        return negated(truths[0])
    return {"logical_and": T.bitwise_and, "logical_or": T.bitwise_or, "logical_xor": T.bitwise_xor}[
        op
    ](*truths)


def _bool(op: str, args: Sequence[Expr]) -> Expr:
    """Arithmetic on bool: addition is "or", multiplication is "and"."""
    if op in ("neg", "abs", "sign", "relu", "floor", "ceil", "trunc", "round"):
        return args[0]
    if op == "bitwise_not":
        return negated(args[0])
    if op in ("add", "maximum", "bitwise_or"):
        return T.bitwise_or(*args)
    if op in ("mul", "minimum", "bitwise_and"):
        return T.bitwise_and(*args)
    if op in ("sub", "bitwise_xor"):
        return T.bitwise_xor(*args)
    raise NotImplementedError(f"{op} of bool")


def _libm(name: str, args: Sequence[Expr], dtype: str) -> Expr:
    return T.call_pure_extern(dtype, name if dtype == "float64" else f"{name}f", *args)


def _float(b: Bindings, op: str, args: Sequence[Expr], dtype: str) -> Expr:
    if len(args) == 2:
        return _float_binary(b, op, args[0], args[1], dtype)
    x = args[0]
    zero, one = T.const(0.0, dtype), T.const(1.0, dtype)
    single = dtype == "float32" and not is_constant(x)
    if single and _by_hardware.get() and op.removeprefix(_FAST) == "sigmoid":
        return one / (one + T.exp(T.const(-1.0, dtype) * x))
    if single and _by_hardware.get() and op in _POWERS:
        return T.exp(x)
    if op in _VECTOR and single:
        return _VECTOR[op](b, x)
    op = op.removeprefix(_FAST)
    if op in (EXP_AT_MOST_ONE, EXP_BESIDE_ONE):
        op = "exp"
    if op in _DOUBLE and dtype == "float64" and not (_by_hardware.get() or is_constant(x)):
        return _DOUBLE[op](b, x)
    if op in _LIBM:
        return _libm(op, args, dtype)
    if op in _ROUNDING:
        return _ROUNDING[op](x)
    match op:
        case "neg":
            return T.const(-1.0, dtype) * x
        case "abs":
            return T.abs(x)
        case "sign":  # torch.sign(nan) is 0
            return T.Select(x > zero, one, T.Select(x < zero, T.const(-1.0, dtype), zero))
        case "relu":
            return T.Select(x < zero, zero, x)
        case "sqrt":
            return T.sqrt(x)
        case "rsqrt":
            return one / T.sqrt(x)
        case "reciprocal":
            return one / x
        case "sigmoid":
            return one / (one + _libm("exp", [T.const(-1.0, dtype) * x], dtype))
    raise NotImplementedError(f"{op} of {dtype}")


def _float_binary(b: Bindings, op: str, x: Expr, y: Expr, dtype: str) -> Expr:
    if x.same_as(y) and op in ("sub", "div"):
        y = b(opaque(y, dtype))
    match op:
        case "add":
            return plus(x, y, dtype)
        case "sub":
            return plus_zero(x, dtype) if is_zero(y, negative=True) else x - y
        case "mul":
            return times(x, y, dtype)
        case "div":
            return divide(x, y, dtype)
        case "maximum" | "minimum" if is_number(x) or is_number(y):
            # Of one that is no NaN and one that may be: a comparison, and one instruction of x86's.
            x, y = (y, x) if is_number(x) else (x, y)
            return T.Select(x < y if op == "maximum" else x > y, y, x)
        case "maximum":
            return T.Select(T.bitwise_or(is_nan(x, dtype), x > y), x, y)
        case "minimum":
            return T.Select(T.bitwise_or(is_nan(x, dtype), x < y), x, y)
        case "pow":
            return _power(b, x, y, dtype)
        case "atan2":
            return (
                binary.angle(b, x, y)
                if _takes_vectors(x, y, dtype)
                else _libm("atan2", [x, y], dtype)
            )
        case "fmod":
            return _remainder(b, x, y, dtype)
        case "truncdiv":
            return T.trunc(divide(x, y, dtype))
        case "floordiv" if _takes_vectors(x, y, dtype):
            return binary.floor_quotient(b, x, y)
        case "mod" | "floordiv":
            return _floor_modulo(b, op, x, y, dtype)
    raise NotImplementedError(f"{op} of {dtype}")


def _takes_vectors(x: Expr, y: Expr, dtype: str) -> bool:
    """Whether ``binary`` computes a function of these; of constants LLVM knows the library's."""
    return dtype == "float32" and not (isinstance(x, T.FloatImm) and isinstance(y, T.FloatImm))


def _remainder(b: Bindings, x: Expr, y: Expr, dtype: str) -> Expr:
    if _takes_vectors(x, y, dtype):
        return binary.remainder(b, x, y)
    return _libm("fmod", [x, y], dtype)


def _floor_modulo(b: Bindings, op: str, x: Expr, y: Expr, dtype: str) -> Expr:
    """Python's ``%`` and ``//`` on floats, from the exact remainder of ``fmod``."""
    zero, one = T.const(0.0, dtype), T.const(1.0, dtype)
    remainder = b(_remainder(b, x, y, dtype))
    wrong_sign = T.bitwise_and(T.NE(remainder, zero), T.bitwise_xor(remainder < zero, y < zero))
    if op == "mod":
        return T.Select(wrong_sign, remainder + y, remainder)
    exact = b(divide(b(x - remainder), y, dtype))
    exact = b(T.Select(wrong_sign, exact - one, exact))
    low = b(T.floor(exact))
    nearest = T.Select(exact - low > T.const(0.5, dtype), low + one, low)
    quotient = b(divide(x, y, dtype))
    return T.Select(
        T.EQ(y, zero), quotient, T.Select(T.EQ(exact, zero), zero_as(quotient, dtype), nearest)
    )


def _power(b: Bindings, x: Expr, y: Expr, dtype: str) -> Expr:
    """Exponents that need no logarithm as products and roots, the others in the library."""
    one = T.const(1.0, dtype)
    if isinstance(y, T.FloatImm):
        square = b(x * x)
        root = b(T.sqrt(x))
        special: dict[float, Expr] = {
            0.0: one, 1.0: x, 2.0: square, 3.0: square * x, 4.0: square * square,
            0.5: root, -0.5: one / root, -1.0: one / x, -2.0: one / square,
        }  # fmt: skip
        if y.value in special:
            return special[y.value]
    if _takes_vectors(x, y, dtype):
        return binary.power(b, x, y)
    return _libm("pow", [x, y], dtype)
