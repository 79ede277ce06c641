"""Powers, angles and remainders of two float32s, in vectors; library calls take them one by one.

``x ** y`` is ``2 ** (y log2 x)`` in double precision, which leaves it within one ulp; remainders
are exact.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from tvm.ir.op import Op, register_op_attr

from torch_pruner.codegen.tir.builders import Expr, T
from torch_pruner.codegen.tir.circular import atan_of_positive
from torch_pruner.codegen.tir.predicates import is_nan, negated
from torch_pruner.codegen.tir.vmath import f32, i32, with_sign

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.codegen.tir.vmath import Bindings

_LOG2 = tuple(2 / math.log(2) / (2 * k + 1) for k in range(7))  # of (1 + s) / (1 - s), in s**2
_EXP2 = tuple(math.log(2) ** k / math.factorial(k) for k in range(9))
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
_MAGIC = 6755399441055744.0  # 1.5 * 2**52 rounds to a whole number, left in the low bits
_MAGIC_BITS = 0x4338000000000000
_MANTISSA = (1 << 52) - 1
_WHOLE = 4503599627370496.0  # 2**52, of which a whole number below it is the mantissa
_WHOLE_BITS = 0x4330000000000000
_BEYOND = 1e60  # no float32
_STEP = 48  # bits of a quotient that a step takes away
_LARGEST = 1000.0  # two to it is infinity as a float32, and to less than its negative zero


def power(b: Bindings, x: Expr, y: Expr) -> Expr:
    """``x ** y`` with the special cases of C's ``pow``."""
    logarithm = b(_log2(b, b(T.abs(_double(x)))))
    exact = b(_double(y))
    # One to any power is one, and any number to the power of zero, NaN too.
    nothing = T.bitwise_or(T.EQ(logarithm, _f64(0.0)), T.EQ(exact, _f64(0.0)))
    exponent = b(T.Select(nothing, _f64(0.0), exact * logarithm))
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
    left, whole = b(T.abs(_double(x))), b(T.abs(_double(y)))
    inverse = b(_f64(1.0) / whole)
    for step in reversed(range(_steps(y))):
        scale = 2.0 ** (_STEP * step)
        count = b(T.trunc(left * (inverse * _f64(1 / scale))))
        taken = whole * _f64(scale) if step else whole
        left = b(_fused(_f64(-1.0) * count, taken, left))
    left = b(T.Select(left < _f64(0.0), left + whole, left))
    left = b(T.Select(left < whole, left, left - whole))
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
    large = T.Select(divisor < _f64(0.0), _f64(-_BEYOND), _f64(_BEYOND))
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
    shifted = b(_bits(a) - _i64(_SQRT_HALF_BITS))
    exponent = b(T.shift_right(shifted, _i64(52)))  # rounds down, for it is signed
    mantissa = T.bitwise_and(shifted, _i64(_MANTISSA)) + _i64(_SQRT_HALF_BITS)
    m = b(T.reinterpret("float64", mantissa))
    s = b((m - _f64(1.0)) / (m + _f64(1.0)))
    series = s * _horner(b(s * s), _LOG2)
    biased = b(T.reinterpret("float64", exponent + _i64(_WHOLE_BITS + 2048)))
    whole = b(biased - _f64(_WHOLE + 2048.0))
    finite = b(whole + series)
    above = T.Select(T.EQ(a, _f64(math.inf)), _f64(math.inf), finite)
    return T.Select(T.EQ(a, _f64(0.0)), _f64(-math.inf), above)


def _exp2(b: Bindings, t: Expr) -> Expr:
    low = b(T.Select(t > _f64(_LARGEST), _f64(_LARGEST), t))
    low = b(T.Select(low > _f64(-_LARGEST), low, _f64(-_LARGEST)))  # of NaN, too
    shifted = b(low + _f64(_MAGIC))
    part = b(low - b(shifted - _f64(_MAGIC)))
    power = T.shift_left(_bits(shifted) - _i64(_MAGIC_BITS - 1023), _i64(52))
    return _horner(part, _EXP2) * T.reinterpret("float64", power)


def _horner(x: Expr, coefficients: Sequence[float]) -> Expr:
    """A polynomial, lowest power first."""
    result: Expr = _f64(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = result * x + _f64(c)
    return result


def _double(x: Expr) -> Expr:
    """A constant holds more digits than a float32: TVM's cast would keep them."""
    if isinstance(x, T.FloatImm):
        return _f64(float(np.float32(x.value)))
    return x.astype("float64")


def _bits(x: Expr) -> Expr:
    return T.reinterpret("int64", x)


FUSED = "torch_pruner.fused"
"""``x * y + z``, rounded once on every processor: TVM's own may be rounded twice."""
register_op_attr(FUSED, "TCallEffectKind", T.CallEffectKind.Pure.value)
register_op_attr(FUSED, "TVectorizable", True)
register_op_attr(FUSED, "TScriptPrinterName", "fused")
T.register_intrin_lowering(
    FUSED, target="llvm", f=lambda call: T.call_llvm_intrin(call.ty, "llvm.fma", *call.args)
)
T.register_intrin_lowering(
    FUSED, target="cuda", f=lambda call: T.call_pure_extern(str(call.ty.dtype), "fma", *call.args)
)


def _fused(x: Expr, y: Expr, z: Expr) -> Expr:
    return T.call_intrin(z.ty, Op.get(FUSED), x, y, z)


def _f64(value: float) -> Expr:
    return T.const(value, "float64")


def _i64(value: int) -> Expr:
    return T.const(value, "int64")
