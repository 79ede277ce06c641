"""Integer arithmetic as TIR: two's complement wraparound and division that cannot trap.

TVM marks sums and products of 32 and 64 bits, signed and unsigned, as never overflowing.
So 32 bits are computed on in 64, which LLVM narrows again, and 64 bits in halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.bits import bitwise_or, bitwise_xor
from torch_pruner.codegen.tir.builders import Expr, T

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.codegen.tir.vmath import Bindings

_SAME = frozenset(("floor", "ceil", "trunc", "round"))


def apply(b: Bindings, op: str, args: Sequence[Expr], dtype: str) -> Expr:
    """``op`` on integers of ``dtype``; the arguments are variables or constants."""
    if op in _SAME:
        return args[0]
    if len(args) == 1:
        return _unary(op, args[0], dtype)
    x, y = args
    match op:
        case "add":
            return add(x, y, dtype)
        case "sub":
            return sub(x, y, dtype)
        case "mul":
            return mul(x, y, dtype)
        case "maximum":
            return T.Select(x > y, x, y)
        case "minimum":
            return T.Select(x < y, x, y)
        case "bitwise_and":
            return T.bitwise_and(x, y)
        case "bitwise_or":
            return bitwise_or(x, y, _bits(dtype))
        case "bitwise_xor":
            return bitwise_xor(x, y, _bits(dtype))
        case "shift_left" | "shift_right":
            return _shift(op, x, y, dtype)
        case "truncdiv" | "fmod" | "floordiv" | "mod":
            return _divide(b, op, x, y, dtype)
        case "pow":
            return _power(b, x, y, dtype)
    raise NotImplementedError(f"{op} of {dtype}")


def _unary(op: str, x: Expr, dtype: str) -> Expr:
    zero, one = T.const(0, dtype), T.const(1, dtype)
    signed = dtype != "uint8"
    match op:
        case "neg":
            return _negate(x, dtype)
        case "abs":
            return T.Select(x < zero, _negate(x, dtype), x) if signed else x
        case "relu":
            return T.Select(x < zero, zero, x) if signed else x
        case "sign":
            positive = T.Select(x > zero, one, zero)
            return T.Select(x < zero, T.const(-1, dtype), positive) if signed else positive
        case "bitwise_not":
            return T.bitwise_not(x)
    raise NotImplementedError(f"{op} of {dtype}")


def _bits(dtype: str) -> int:
    return int(dtype.removeprefix("u").removeprefix("int"))


def _lowest(dtype: str) -> int:
    return 0 if dtype == "uint8" else -(2 ** (_bits(dtype) - 1))


def add(x: Expr, y: Expr, dtype: str) -> Expr:
    if dtype == "int64":
        return _add_halves(_halves(x), _halves(y), 0)
    return _narrow(_widen(x, dtype) + _widen(y, dtype), dtype)


def sub(x: Expr, y: Expr, dtype: str) -> Expr:
    if dtype == "int64":
        return _add_halves(_halves(x), _halves(T.bitwise_not(y)), 1)
    return _narrow(_widen(x, dtype) - _widen(y, dtype), dtype)


def mul(x: Expr, y: Expr, dtype: str) -> Expr:
    if dtype != "int64":
        return _narrow(_widen(x, dtype) * _widen(y, dtype), dtype)
    (low, high), (other_low, other_high) = _halves(x), _halves(y)
    crossed = _low(low * other_high) + _low(high * other_low)
    product = low * other_low
    return _join(product, T.shift_right(product, _u64(32)) + _low(crossed))


def _widen(x: Expr, dtype: str) -> Expr:
    return T.Cast("int64", x) if dtype == "int32" else x


def _narrow(x: Expr, dtype: str) -> Expr:
    return T.Cast("int32", x) if dtype == "int32" else x


def _u64(value: int) -> Expr:
    return T.const(value, "uint64")


def _low(x: Expr) -> Expr:
    return T.bitwise_and(x, _u64(0xFFFFFFFF))


def _halves(x: Expr) -> tuple[Expr, Expr]:
    bits = _u64(x.value % 2**64) if isinstance(x, T.IntImm) else T.reinterpret("uint64", x)
    return _low(bits), T.shift_right(bits, _u64(32))


def _add_halves(x: tuple[Expr, Expr], y: tuple[Expr, Expr], carry: int) -> Expr:
    low = x[0] + y[0] + _u64(carry)
    return _join(low, x[1] + y[1] + T.shift_right(low, _u64(32)))


def _join(low: Expr, high: Expr) -> Expr:
    return T.reinterpret("int64", T.bitwise_or(T.shift_left(high, _u64(32)), _low(low)))


def _negate(x: Expr, dtype: str) -> Expr:
    return sub(T.const(0, dtype), x, dtype)


def _shift(op: str, x: Expr, y: Expr, dtype: str) -> Expr:
    """Counts outside the width shift everything out; the processor would take them modulo."""
    bits = _bits(dtype)
    count = T.Cast("uint64" if bits == 64 else "uint32", y)  # a negative count is a huge one
    inside = count < T.const(bits, str(count.ty.dtype))
    safe = T.Select(inside, y, T.const(0, dtype))
    if op == "shift_left":
        return T.Select(inside, T.shift_left(x, safe), T.const(0, dtype))
    zero = T.const(0, dtype)
    outside = zero if dtype == "uint8" else T.Select(x < zero, T.const(-1, dtype), zero)
    return T.Select(inside, T.shift_right(x, safe), outside)


def _divide(b: Bindings, op: str, x: Expr, y: Expr, dtype: str) -> Expr:
    """x / 0 and x % 0 are 0, where eager raises. -x stands for x / -1, which can overflow."""
    zero, one = T.const(0, dtype), T.const(1, dtype)
    by_zero = T.EQ(y, zero)
    special = by_zero if dtype == "uint8" else T.bitwise_or(by_zero, T.EQ(y, T.const(-1, dtype)))
    plain = isinstance(y, T.IntImm) and y.value not in (0, -1)
    quotient = b(T.truncdiv(x, y if plain else b(T.Select(special, one, y))))
    if dtype != "uint8":
        quotient = b(T.Select(special, _negate(x, dtype), quotient))
    quotient = b(T.Select(by_zero, zero, quotient))
    if op == "truncdiv":
        return quotient
    remainder = sub(x, b(mul(quotient, y, dtype)), dtype)
    remainder = b(T.Select(by_zero, zero, remainder))
    if op == "fmod":
        return remainder
    wrong_sign = T.bitwise_and(T.NE(remainder, zero), T.bitwise_xor(remainder < zero, y < zero))
    if op == "mod":
        return T.Select(wrong_sign, add(remainder, y, dtype), remainder)
    return T.Select(wrong_sign, sub(quotient, one, dtype), quotient)


def _power(b: Bindings, x: Expr, y: Expr, dtype: str) -> Expr:
    """By squaring. A negative exponent gives 0 unless the base is 1 or -1."""
    zero, one = T.const(0, dtype), T.const(1, dtype)
    base, result = x, one
    steps = y.value.bit_length() if isinstance(y, T.IntImm) and y.value >= 0 else _bits(dtype)
    for i in range(steps):
        bit = T.bitwise_and(T.shift_right(y, T.const(i, dtype)), one)
        product = b(mul(result, base, dtype))
        result = b(T.Select(T.NE(bit, zero), product, result))
        if i + 1 < steps:
            base = b(mul(base, base, dtype))
    if dtype == "uint8" or (isinstance(y, T.IntImm) and y.value >= 0):
        return result
    minus = T.const(-1, dtype)
    odd = T.NE(T.bitwise_and(y, one), zero)
    unit = T.Select(T.EQ(x, minus), T.Select(odd, minus, one), T.Select(T.EQ(x, one), one, zero))
    return T.Select(y < zero, unit, result)
