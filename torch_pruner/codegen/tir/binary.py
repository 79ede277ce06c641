"""Powers, angles and remainders of two float32s, in vectors; library calls take them one by one.

``x ** y`` is ``2 ** (y log2 x)`` in double precision, which leaves it within one ulp; remainders
are exact.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.codegen.tir.builders import Expr, T
from torch_pruner.codegen.tir.circular import atan_of_positive
from torch_pruner.codegen.tir.double import (
    MAGIC,
    MAGIC_BITS,
    MANTISSA,
    SQRT_HALF_BITS,
    bits,
    f64,
    horner,
    i64,
    whole,
)
from torch_pruner.codegen.tir.intrinsics import fused, rarely
from torch_pruner.codegen.tir.predicates import is_nan, negated
from torch_pruner.codegen.tir.vmath import f32, i32, with_sign

if TYPE_CHECKING:
    from torch_pruner.codegen.tir.vmath import Bindings

_LOG2 = tuple(2 / math.log(2) / (2 * k + 1) for k in range(7))  # of (1 + s) / (1 - s), in s**2
_EXP2 = tuple(math.log(2) ** k / math.factorial(k) for k in range(9))
_BEYOND = 1e60  # no float32
_STEP = 48  # bits of a quotient that a step takes away
_LARGEST = 1000.0  # two to it is infinity as a float32, and to less than its negative zero


def power(b: Bindings, x: Expr, y: Expr) -> Expr:
    """``x ** y`` with the special cases of C's ``pow``."""
    logarithm = b(_log2(b, b(T.abs(_double(x)))))
    exact = b(_double(y))
    # One to any power is one, and any number to the power of zero, NaN too.
    nothing = T.bitwise_or(T.EQ(logarithm, f64(0.0)), T.EQ(exact, f64(0.0)))
    exponent = b(T.Select(nothing, f64(0.0), exact * logarithm))
    magnitude = b(_exp2(b, exponent).astype("float32"))
    half = b(y * f32(0.5))
    whole = T.EQ(T.floor(y), y)
    odd = b(T.bitwise_and(T.NE(T.floor(half), half), whole))  # no NaN, and no infinity
    signed = T.Select(odd, with_sign(magnitude, x), magnitude)
    finite = T.bitwise_and(x < f32(0.0), x > f32(-math.inf))
    unreal = T.bitwise_and(finite, T.NE(T.floor(y), y))
    no_number = T.bitwise_and(is_nan(x, "float32"), T.NE(y, f32(0.0)))
    undefined = T.bitwise_or(no_number, T.bitwise_or(unreal, is_nan(y, "float32")))
    other = negated(T.EQ(x, f32(1.0)))  # one to the power of NaN is one
    return T.Select(T.bitwise_and(undefined, other), f32(math.nan), signed)


def angle(b: Bindings, y: Expr, x: Expr) -> Expr:
    """``atan2(y, x)``: the angle of the point (x, y), from -pi to pi."""
    height, width = b(T.abs(y)), b(T.abs(x))
    steep = b(height > width)
    less, more = b(T.Select(steep, width, height)), b(T.Select(steep, height, width))
    same = T.EQ(less, more)  # of two zeros 0, of two infinities 1
    ratio = T.Select(same, T.Select(T.EQ(more, f32(0.0)), f32(0.0), f32(1.0)), less / more)
    near = b(atan_of_positive(b, b(ratio)))
    turned = b(T.Select(steep, f32(math.pi / 2) - near, near))
    behind = T.reinterpret("int32", x) < i32(0)  # -0, too
    result = with_sign(b(T.Select(behind, f32(math.pi) - turned, turned)), y)
    undefined = T.bitwise_or(is_nan(x, "float32"), is_nan(y, "float32"))
    return T.Select(undefined, f32(math.nan), result)


def remainder(b: Bindings, x: Expr, y: Expr) -> Expr:
    """C's ``fmod``: what is left of ``x`` by whole ``y``s, with the sign of ``x``.

    Quotients go up to 2**277. Each step takes away as many of y times a power of two as a double
    counts exactly: what is left then is a float32's mantissa or so, exact again.
    """
    numerator, divisor = b(T.abs(x)), b(T.abs(y))
    left, size = b(T.abs(_double(x))), b(T.abs(_double(y)))
    inverse = b(f64(1.0) / size)

    def less(b: Bindings, left: Expr, step: int) -> Expr:
        scale = 2.0 ** (_STEP * step)
        count = b(T.trunc(left * (inverse * f64(1 / scale))))
        return b(fused(f64(-1.0) * count, size * f64(scale) if step else size, left))

    def least(b: Bindings) -> Expr:
        return reduce(lambda left, step: less(b, left, step), range(_steps(y) - 1, 0, -1), left)

    if _steps(y) > 1:
        left = rarely(b, left * (inverse * f64(2.0**-_STEP)) >= f64(1.0), least, left)
    left = less(b, left, 0)
    left = b(T.Select(left < f64(0.0), left + size, left))
    left = b(T.Select(left < size, left, left - size))
    single = T.Select(T.EQ(divisor, f32(math.inf)), numerator, left.astype("float32"))
    undefined = T.bitwise_or(
        T.bitwise_or(is_nan(x, "float32"), is_nan(y, "float32")),
        T.bitwise_or(T.EQ(numerator, f32(math.inf)), T.EQ(divisor, f32(0.0))),
    )
    return T.Select(undefined, f32(math.nan), with_sign(b(single), x))


def floor_quotient(b: Bindings, x: Expr, y: Expr) -> Expr:
    """The largest whole number that is not above ``x / y``, as Python's ``//`` has it.

    A quotient of float32s that is no whole number is 2**-24 of one away from the next, and as a
    double it is nearer to itself than that up to 2**28; from there on it is rounded anyway.
    """
    divisor = _double(y)
    # By infinity something negative leaves -1: so does what is larger than every float32.
    large = T.Select(divisor < f64(0.0), f64(-_BEYOND), f64(_BEYOND))
    divisor = b(T.Select(T.EQ(T.abs(y), f32(math.inf)), large, divisor))
    quotient = b(b(_double(x)) / divisor)
    floor = b(T.floor(quotient).astype("float32"))
    undefined = T.bitwise_and(T.EQ(T.abs(x), f32(math.inf)), T.NE(y, f32(0.0)))
    return T.Select(undefined, f32(math.nan), floor)


def _steps(divisor: Expr) -> int:
    """How many steps the largest quotient takes."""
    least = abs(divisor.value) if isinstance(divisor, T.FloatImm) else 0.0
    least = least if math.isfinite(least) else 1.0
    return max(1, math.ceil((128 - math.log2(max(least, 2.0**-149))) / _STEP))


def _log2(b: Bindings, a: Expr) -> Expr:
    """Of float32s as float64s, which are never subnormal. NaN gives any number."""
    shifted = b(bits(a) - i64(SQRT_HALF_BITS))
    exponent = b(T.shift_right(shifted, i64(52)))  # rounds down, for it is signed
    mantissa = T.bitwise_and(shifted, i64(MANTISSA)) + i64(SQRT_HALF_BITS)
    m = b(T.reinterpret("float64", mantissa))
    s = b((m - f64(1.0)) / (m + f64(1.0)))
    series = s * horner(b(s * s), _LOG2)
    finite = b(whole(b, exponent) + series)
    above = T.Select(T.EQ(a, f64(math.inf)), f64(math.inf), finite)
    return T.Select(T.EQ(a, f64(0.0)), f64(-math.inf), above)


def _exp2(b: Bindings, t: Expr) -> Expr:
    low = b(T.Select(t > f64(_LARGEST), f64(_LARGEST), t))
    low = b(T.Select(low > f64(-_LARGEST), low, f64(-_LARGEST)))  # of NaN, too
    shifted = b(low + f64(MAGIC))
    part = b(low - b(shifted - f64(MAGIC)))
    power = T.shift_left(bits(shifted) - i64(MAGIC_BITS - 1023), i64(52))
    return horner(part, _EXP2) * T.reinterpret("float64", power)


def _double(x: Expr) -> Expr:
    """A constant holds more digits than a float32: TVM's cast would keep them."""
    if isinstance(x, T.FloatImm):
        return f64(float(np.float32(x.value)))
    return x.astype("float64")
