"""Float64 elementary functions as branch-free TIR expressions, as ``vmath`` has them of float32.

Within three units in the last place. Coefficients are interpolations at Chebyshev nodes, lowest
power first. Circular functions of large numbers are the library's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import Expr, T
from torch_pruner.codegen.tir.intrinsics import fused, rarely

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.codegen.tir.vmath import Bindings

_LOG2E = 1.4426950408889634
_LN2_HI, _LN2_LO = 0.6931471803691238, 1.9082149292705877e-10  # the high part has 32 bits
_LOG10_2_HI, _LOG10_2_LO = 0.3010299955494702, 1.1451100898021838e-10
_LOG10E = math.log10(math.e)
MAGIC = 6755399441055744.0  # 1.5 * 2**52 rounds to a whole number, left in the low bits
MAGIC_BITS = 0x4338000000000000
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
MANTISSA = (1 << 52) - 1
_WHOLE = 4503599627370496.0  # 2**52, of which a whole number below it is the mantissa
_WHOLE_BITS = 0x4330000000000000
_LEAST, _MOST = -746.0, 710.0  # e to them is 0, and infinity
_TINY = 2.2250738585072014e-308

_EXPM1 = (  # ((e**r - 1) - r) / r**2, |r| <= ln 2 / 2
    0.5, 0.1666666666666667, 0.04166666666666667, 0.008333333333326136, 0.0013888888888883748,
    0.00019841269874820627, 2.4801587325547743e-05, 2.7557255400206422e-06, 2.75572736431103e-07,
    2.5105217004720745e-08, 2.0914686968086876e-09,
)  # fmt: skip
_EXP2 = (  # (2**r - 1) / r, |r| <= 1/2
    0.6931471805599453, 0.24022650695910072, 0.055504108664821625, 0.00961812910762848,
    0.0013333558146406436, 0.00015403530393370715, 1.5252733841601815e-05, 1.3215486808727859e-06,
    1.0178057064573359e-07, 7.054897292691627e-09, 4.455822025014915e-10, 2.5729344553786755e-11,
)  # fmt: skip
_LOG = (  # (2 atanh(s) / s - 2) / s**2 in s**2, s of sqrt(1/2) to sqrt(2)
    0.666666666666667, 0.3999999999989827, 0.2857142862653362, 0.22222211043776857,
    0.18182895750119193, 0.1533150161114533, 0.1461916613488797,
)  # fmt: skip
_SIN = (  # (sin(x) / x - 1) / x**2 in x**2, |x| <= pi / 4
    -0.16666666666666665, 0.0083333333333309366, -0.00019841269836740532, 2.7557316093198405e-6,
    -2.5051129896450182e-8, 1.5917988979397206e-10,
)  # fmt: skip
_COS = (  # (cos(x) - 1 + x**2 / 2) / x**4 in x**2
    0.041666666666666665, -0.001388888888888739, 2.4801587298754401e-5, -2.755731726587808e-7,
    2.0876145049413177e-9, -1.1382544645349108e-11,
)  # fmt: skip
_HALF_PIS = tuple(  # pi/2 in three float64s
    map(float.fromhex, ("0x1.921fb54442d18p+0", "0x1.1a62633145c07p-54", "-0x1.f1976b7ed8fbcp-110"))
)
_NEAR = 2.0**20  # up to there these are enough, as in ``circular``


def f64(value: float) -> Expr:
    return T.const(value, "float64")


def i64(value: int) -> Expr:
    return T.const(value, "int64")


def bits(x: Expr) -> Expr:
    return T.reinterpret("int64", x)


def horner(x: Expr, coefficients: Sequence[float]) -> Expr:
    """A polynomial, lowest power first."""
    total: Expr = f64(coefficients[-1])
    for value in reversed(coefficients[:-1]):
        total = total * x + f64(value)
    return total


def whole(b: Bindings, exponent: Expr) -> Expr:
    """A whole number of less than 2048 as a float64: processors without AVX-512 convert none."""
    biased = b(T.reinterpret("float64", exponent + i64(_WHOLE_BITS + 2048)))
    return b(biased - f64(_WHOLE + 2048.0))


def _clamp(x: Expr, low: float, high: float) -> Expr:
    """NaN stays NaN."""
    return T.Select(x > f64(high), f64(high), T.Select(x < f64(low), f64(low), x))


def _with_sign(magnitude: Expr, x: Expr) -> Expr:
    return T.Select(bits(x) < i64(0), f64(-1.0) * magnitude, magnitude)


def _power_of_two(n: Expr) -> Expr:
    """2**n for -1023 <= n <= 1024, of which the ends give 0 and infinity."""
    return T.reinterpret("float64", T.shift_left(n + i64(1023), i64(52)))


def _round(b: Bindings, scaled: Expr) -> tuple[Expr, Expr]:
    """The nearest whole number as float64 and as int64. NaN gives NaN and any number."""
    shifted = b(scaled + f64(MAGIC))
    return b(shifted - f64(MAGIC)), b(bits(shifted) - i64(MAGIC_BITS))


def _scale(b: Bindings, x: Expr, n: Expr) -> Expr:
    """x * 2**n, through denormals and to infinity."""
    half = b(T.shift_right(n, i64(1)))
    return x * _power_of_two(half) * _power_of_two(n - half)


def _reduce_exp(b: Bindings, x: Expr) -> tuple[Expr, Expr]:
    """(e**r - 1, n) with x = n ln 2 + r and |r| <= ln 2 / 2."""
    n, k = _round(b, b(x * f64(_LOG2E)))
    r = b(b(x - n * f64(_LN2_HI)) - n * f64(_LN2_LO))
    return b(r * r * horner(r, _EXPM1) + r), k


def exp(b: Bindings, x: Expr) -> Expr:
    m, n = _reduce_exp(b, b(_clamp(b(x), _LEAST, _MOST)))
    return _scale(b, b(m + f64(1.0)), n)


def exp2(b: Bindings, x: Expr) -> Expr:
    x = b(_clamp(b(x), -1076.0, 1025.0))
    n, k = _round(b, x)
    r = b(x - n)
    return _scale(b, b(r * horner(r, _EXP2) + f64(1.0)), k)


def _expm1(b: Bindings, x: Expr) -> Expr:
    """For -40 <= x <= 710."""
    m, n = _reduce_exp(b, x)
    half = b(_power_of_two(n - i64(1)))  # 2**1024 is no float64
    result = b(half * m + (half - f64(0.5)))
    return result + result


def expm1(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    return T.Select(T.EQ(x, f64(0.0)), x, _expm1(b, b(_clamp(x, -40.0, _MOST))))


def sigmoid(b: Bindings, x: Expr) -> Expr:
    return f64(1.0) / (b(exp(b, f64(-1.0) * b(x))) + f64(1.0))


def tanh(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    a = b(_clamp(T.abs(x), 0.0, 20.0))
    e = b(_expm1(b, b(a + a)))
    return _with_sign(b(e / (e + f64(2.0))), x)


def _split_log(b: Bindings, x: Expr) -> tuple[Expr, Expr, Expr]:
    """(n, f, c) with log x = n ln 2 + f + c for normal positive x and c of the order of f**2."""
    shifted = b(bits(x) - i64(SQRT_HALF_BITS))
    n = whole(b, b(T.shift_right(shifted, i64(52))))  # rounds down, for it is signed
    mantissa = T.bitwise_and(shifted, i64(MANTISSA)) + i64(SQRT_HALF_BITS)
    f = b(T.reinterpret("float64", mantissa) - f64(1.0))
    s = b(f / (f64(2.0) + f))
    square = b(s * s)
    half = b(f64(0.5) * f * f)
    return n, f, b(s * (half + square * horner(square, _LOG)) - half)


def _log_limits(x: Expr, result: Expr, pole: float) -> Expr:
    at_pole = T.Select(T.EQ(x, f64(pole)), f64(-math.inf), f64(math.nan))
    return T.Select(x > f64(pole), T.Select(x < f64(math.inf), result, x), at_pole)


def _log(b: Bindings, x: Expr, combine: Callable[[Expr, Expr, Expr], Expr]) -> Expr:
    x = b(x)
    denormal = x < f64(_TINY)
    n, f, c = _split_log(b, b(T.Select(denormal, x * f64(2.0**54), x)))
    n = b(n - T.Select(denormal, f64(54.0), f64(0.0)))
    return _log_limits(x, b(combine(n, f, c)), 0.0)


def log(b: Bindings, x: Expr) -> Expr:
    return _log(b, x, lambda n, f, c: b(n * f64(_LN2_LO) + c) + f + n * f64(_LN2_HI))


def log2(b: Bindings, x: Expr) -> Expr:
    return _log(b, x, lambda n, f, c: b(f + c) * f64(_LOG2E) + n)


def log10(b: Bindings, x: Expr) -> Expr:
    def combine(n: Expr, f: Expr, c: Expr) -> Expr:
        return b(b(f + c) * f64(_LOG10E) + n * f64(_LOG10_2_LO)) + n * f64(_LOG10_2_HI)

    return _log(b, x, combine)


def log1p(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    u = b(x + f64(1.0))
    lost = b(x - b(u - f64(1.0)))
    n, f, c = _split_log(b, u)
    small = b(n * f64(_LN2_LO) + (c + lost / u))
    result = b(small + f + n * f64(_LN2_HI))
    return T.Select(T.EQ(x, f64(0.0)), x, _log_limits(x, result, -1.0))


def sin(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    return T.Select(T.EQ(x, f64(0.0)), x, _wave(b, x, 0, "sin"))


def cos(b: Bindings, x: Expr) -> Expr:
    return _wave(b, b(x), 1, "cos")


def tan(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    sine, cosine, n = _near_circle(b, x)
    turned = b(T.NE(T.bitwise_and(n, i64(1)), i64(0)))
    above = T.Select(turned, f64(-1.0) * cosine, sine)
    near = T.Select(T.EQ(x, f64(0.0)), x, above / T.Select(turned, sine, cosine))
    return _by_library(b, x, "tan", near)


def _wave(b: Bindings, x: Expr, quadrants: int, name: str) -> Expr:
    """sin(x + quadrants * pi / 2)."""
    sine, cosine, n = _near_circle(b, x)
    n = b(n + i64(quadrants)) if quadrants else n
    value = b(T.Select(T.EQ(T.bitwise_and(n, i64(1)), i64(0)), sine, cosine))
    sign = T.shift_left(T.bitwise_and(n, i64(2)), i64(62))
    near = T.reinterpret("float64", T.bitwise_xor(bits(value), sign))
    return _by_library(b, x, name, near)


def _by_library(b: Bindings, x: Expr, name: str, near: Expr) -> Expr:
    far = T.Not(T.abs(x) < f64(_NEAR))
    return rarely(b, far, lambda _own: T.call_pure_extern("float64", name, x), near)


def _near_circle(b: Bindings, x: Expr) -> tuple[Expr, Expr, Expr]:
    """(sin r, cos r, n) with x = n pi / 2 + r and |r| hardly above pi / 4, for |x| < ``_NEAR``."""
    n, k = _round(b, b(x * f64(2 / math.pi)))
    r = x
    for part in _HALF_PIS:
        r = b(fused(n, f64(-part), r))
    square = b(r * r)
    half = b(f64(0.5) * square)
    rest = b(f64(1.0) - half)
    lost = b(b(f64(1.0) - rest) - half)
    sine = b(r * square * horner(square, _SIN) + r)
    return sine, b(b(square * square * horner(square, _COS) + lost) + rest), k
