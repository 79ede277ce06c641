"""Sums, products and quotients of floats that TVM's simplifier, which takes floats for reals, would
change: with zeros of either sign, NaN and infinities."""

from __future__ import annotations

import math
from typing import TypeGuard

from torch_pruner.codegen.tir.builders import Expr, T
from torch_pruner.codegen.tir.predicates import is_nan


def is_constant(x: Expr) -> bool:
    return isinstance(x, T.FloatImm)


def is_number(x: Expr) -> TypeGuard[T.FloatImm]:
    return isinstance(x, T.FloatImm) and not math.isnan(x.value)


def is_zero(x: Expr, *, negative: bool | None = None) -> TypeGuard[T.FloatImm]:
    """Whether ``x`` is a constant zero, of this sign if one is given."""
    if not isinstance(x, T.FloatImm) or x.value != 0.0:
        return False
    return negative is None or (math.copysign(1.0, x.value) < 0) == negative


def plus(x: Expr, y: Expr, dtype: str) -> Expr:
    """A sum; TVM takes one with zero to be the other operand, also where that is -0.0."""
    if is_zero(x):
        x, y = y, x
    return plus_zero(x, dtype) if is_zero(y, negative=False) else x + y


def plus_zero(x: Expr, dtype: str) -> Expr:
    zero = T.const(0.0, dtype)
    return x + zero if isinstance(x, T.FloatImm) else T.Select(T.EQ(x, zero), zero, x)


def _zero_signed(zero: T.FloatImm, by: Expr, dtype: str) -> Expr:
    """The constant ``zero`` times or over a finite number: a zero whose sign is of both."""
    signed = by if math.copysign(1.0, zero.value) > 0 else T.const(-1.0, dtype) * by
    return zero_as(signed, dtype)


def zero_as(x: Expr, dtype: str) -> Expr:
    """A zero with the sign of ``x``. Of its bits, for ``copysign`` takes no vectors."""
    words = {"float32": "int32", "float64": "int64"}.get(dtype)
    if words is None or isinstance(x, T.FloatImm):
        return T.copysign(T.const(0.0, dtype), x)
    sign = T.const(-(2 ** (int(words[3:]) - 1)), words)
    return T.reinterpret(dtype, T.bitwise_and(T.reinterpret(words, x), sign))


def times(x: Expr, y: Expr, dtype: str) -> Expr:
    """A product; TVM takes one with zero to be zero, even for NaN."""
    if is_zero(x):
        x, y = y, x
    if not is_zero(y) or isinstance(x, T.FloatImm):
        return x * y
    finite = T.abs(x) < T.const(math.inf, dtype)
    return T.Select(finite, _zero_signed(y, x, dtype), T.const(math.nan, dtype))


def divide(x: Expr, y: Expr, dtype: str) -> Expr:
    """A quotient; TVM refuses a constant zero divisor and takes 0 / y to be 0."""
    nan = T.const(math.nan, dtype)
    if is_zero(y):
        infinity = math.copysign(math.inf, y.value)
        above = T.Select(x > T.const(0.0, dtype), T.const(infinity, dtype), nan)
        return T.Select(x < T.const(0.0, dtype), T.const(-infinity, dtype), above)
    if is_zero(x):
        no_number = T.bitwise_or(is_nan(y, dtype), T.EQ(y, x))
        return T.Select(no_number, nan, _zero_signed(x, y, dtype))
    return x / y
