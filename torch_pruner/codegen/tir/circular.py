"""Circular functions of float32 and their inverses, from polynomials, within four ulp."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import Expr, T
from torch_pruner.codegen.tir.intrinsics import fused, rarely
from torch_pruner.codegen.tir.vmath import MAGIC, MAGIC_BITS, f32, horner, i32, with_sign

if TYPE_CHECKING:
    from torch_pruner.codegen.tir.vmath import Bindings

_ATAN = (  # (atan(x) / x - 1) / x**2 in x**2, |x| <= 1
    -0.3333333134651184, 0.19999754428863525, -0.14278893172740936, 0.11036297678947449,
    -0.08666627109050751, 0.06270591169595718, -0.03610917180776596, 0.013652062974870205,
    -0.0024226526729762554,
)  # fmt: skip
_ASIN = (  # (asin(x) / x - 1) / x**2 in x**2, |x| <= 1/2
    0.1666666567325592, 0.07500099390745163, 0.04459794610738754, 0.031116796657443047,
    0.017075760290026665, 0.03380826860666275,
)  # fmt: skip
_HALF_PI = 1.5707963267948966
# pi/2 in three float32s. Whole times the first taken off a float32 below ``_NEAR`` leave an exact
# number, for both are multiples of one power of two, and no float32 there is so near a multiple of
# pi/2 that the first two cancel further than the third fills up.
_HALF_PIS = tuple(map(float.fromhex, ("0x1.921fb6p+0", "-0x1.777a5cp-25", "-0x1.ee59dap-50")))
_NEAR = 2.0**15
_SIN = (-0.16666653752326965, 0.008332133293151855, -0.00019511458231136203)
_COS = (0.04166664555668831, -0.0013887278037145734, 2.442878576403018e-05)
# 2/pi in three parts of 29, 29 and 53 bits for float32s below the bound in the first column and
# not below the one above it, without the leading bits that add only multiples of four to a product.
_TWO_OVER_PI = (
    (2.0**48, "0x1.45f306d000000p-1", "0x1.9391054000000p-30", "0x1.4fe13abe8fa9ap-59"),
    (2.0**75, "0x1.6e4e441000000p-24", "0x1.4a7f09c000000p-54", "0x1.5f47d4d377037p-82"),
    (2.0**102, "0x1.529fc26000000p-52", "0x1.57d1f53000000p-80", "0x1.377036d8a5665p-110"),
    (math.inf, "0x1.d5f47d4000000p-78", "0x1.a6ee06d000000p-107", "0x1.6295993c43904p-136"),
)


def atan(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    return with_sign(b(atan_of_positive(b, b(T.abs(x)))), x)


def atan_of_positive(b: Bindings, a: Expr) -> Expr:
    """For a >= 0."""
    large = b(a > f32(1.0))
    t = b(T.Select(large, f32(1.0) / a, a))
    square = b(t * t)
    r = b(t * square * horner(square, _ATAN) + t)
    return T.Select(large, f32(_HALF_PI) - r, r)


def asin(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    a = b(T.abs(x))
    r = b(_asin(b, a))
    return with_sign(b(T.Select(a > f32(0.5), f32(_HALF_PI) - (r + r), r)), x)


def acos(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    a = b(T.abs(x))
    r = b(_asin(b, a))
    twice = b(r + r)
    far = T.Select(x < f32(0.0), f32(2.0 * _HALF_PI) - twice, twice)
    return T.Select(a > f32(0.5), far, f32(_HALF_PI) - with_sign(r, x))


def _asin(b: Bindings, a: Expr) -> Expr:
    """For 0 <= a <= 1; of more than 1/2 half of pi/2 - asin(a)."""
    far = b(a > f32(0.5))
    half = b(f32(0.5) * (f32(1.0) - a))
    t = b(T.Select(far, T.sqrt(half), a))
    square = b(T.Select(far, half, t * t))
    return t * square * horner(square, _ASIN) + t


def sin(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    return T.Select(T.EQ(x, f32(0.0)), x, _circular(b, x, 0))


def cos(b: Bindings, x: Expr) -> Expr:
    return _circular(b, x, 1)


def tan(b: Bindings, x: Expr) -> Expr:
    """The quotient of what ``_circular`` chooses from."""
    x = b(x)

    def quotient(b: Bindings, r: Expr, n: Expr) -> Expr:
        sine, cosine = _sine_and_cosine(b, r)
        turned = b(T.NE(T.bitwise_and(n, i32(1)), i32(0)))
        above = T.Select(turned, f32(-1.0) * cosine, sine)
        return above / T.Select(turned, sine, cosine)

    far = T.Not(T.abs(x) < f32(_NEAR))
    common = quotient(b, *_reduce_near_circle(b, x))
    result = rarely(b, far, lambda own: quotient(own, *_reduce_circle(own, x)), common)
    return T.Select(T.EQ(x, f32(0.0)), x, result)


def _sine_and_cosine(b: Bindings, r: Expr) -> tuple[Expr, Expr]:
    """For |r| <= pi / 4."""
    square = b(r * r)
    sine = b(r * square * horner(square, _SIN) + r)
    return sine, b(square * square * horner(square, _COS) + (f32(1.0) - f32(0.5) * square))


def _circular(b: Bindings, x: Expr, quadrants: int) -> Expr:
    """sin(x + quadrants * pi / 2) for every float32."""
    x = b(x)

    def wave(b: Bindings, r: Expr, n: Expr) -> Expr:
        n = b(n + i32(quadrants)) if quadrants else n
        odd, even = _sine_and_cosine(b, r)
        value = b(T.Select(T.EQ(T.bitwise_and(n, i32(1)), i32(0)), odd, even))
        sign = T.shift_left(T.bitwise_and(n, i32(2)), i32(30))
        return T.reinterpret("float32", T.bitwise_xor(T.reinterpret("int32", value), sign))

    common = wave(b, *_reduce_near_circle(b, x))
    far = T.Not(T.abs(x) < f32(_NEAR))
    return rarely(b, far, lambda own: wave(own, *_reduce_circle(own, x)), common)


def _reduce_near_circle(b: Bindings, x: Expr) -> tuple[Expr, Expr]:
    """(r, n) with x = n pi / 2 + r and |r| hardly above pi / 4, for |x| < ``_NEAR``."""
    shifted = b(x * f32(2 / math.pi) + f32(MAGIC))
    n = b(shifted - f32(MAGIC))
    r = x
    for part in _HALF_PIS:
        r = b(fused(n, f32(-part), r))
    return r, b(T.reinterpret("int32", shifted) - i32(MAGIC_BITS))


def _reduce_circle(b: Bindings, x: Expr) -> tuple[Expr, Expr]:
    """(r, n) with x = (n + 4 i) pi / 2 + r, i an integer and |r| <= pi / 4; NaN for infinities.

    The products with the first two parts of 2/pi are exact in float64, and so is taking off
    multiples of four.
    """

    def f64(value: float) -> Expr:
        return T.const(value, "float64")

    magnitude = b(T.abs(x))
    parts = [float.fromhex(part) for part in _TWO_OVER_PI[-1][1:]]
    chosen = [f64(part) for part in parts]
    for bound, *texts in reversed(_TWO_OVER_PI[:-1]):
        below = magnitude < f32(bound)
        chosen = [
            T.Select(below, f64(float.fromhex(t)), c) for t, c in zip(texts, chosen, strict=True)
        ]
    wide = b(T.Cast("float64", x))
    first, second, third = (b(wide * c) for c in chosen)
    first = b(first - f64(4.0) * T.nearbyint(first * f64(0.25)))
    second = b(second - f64(4.0) * T.nearbyint(second * f64(0.25)))
    magic = f64(1.5 * 2.0**52)
    shifted = b(b(b(first + second) + third) + magic)
    n = b(shifted - magic)
    turn = b(b(b(first - n) + second) + third)
    low_bits = T.Cast("int32", T.bitwise_and(T.reinterpret("int64", shifted), T.const(3, "int64")))
    return b(T.Cast("float32", turn * f64(math.pi / 2))), b(low_bits)
