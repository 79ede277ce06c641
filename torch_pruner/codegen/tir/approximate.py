"""Cheaper float32 elementary functions, for what ``fast_math`` lets kernels compute less exactly.

In and out as in ``vmath``. Errors are relative to the true result and were found by going through
float32s (``tests/unit/graph/test_approximations.py`` does it again, in numpy):

| function | largest error | where it is 0 |
|---|---|---|
| exp | 2**-13.2 | below 2**-125.5; infinity from 2**128 on |
| exp of what is not positive | 2**-13.2 | below 2**-126.5 |
| sigmoid | 2**-13.2 | below 2**-125.5 |
| tanh | 2**-13.8; +-1 from 5.2 on | at 0 |
| erf | 2**-15; +-1 from 3 on | at 0 |

NaN stays NaN, e**-inf is 0, and e**0 is 1. Coefficients are least-maximum fits, lowest power first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import Expr, T
from torch_pruner.codegen.tir.vmath import clamp, f32, horner, i32

if TYPE_CHECKING:
    from torch_pruner.codegen.tir.vmath import Bindings

LOG2E = 1.4426950408889634
MAGIC = 12582912.0  # adding it rounds to an integer, left in the low bits
LEAST_EXP, LEAST_EXP_BESIDE_ONE, MOST_EXP = -88.0, -87.3, 88.9  # as in ``vmath``
EXP2 = (1.0, 0.6932829022407532, 0.2422109693288803, 0.05500893294811249)  # |x| <= 1 / 2
ERF = (  # erf(x) / x in x**2; from x = 3 on x times it is above 1
    1.128365397453308, -0.37576809525489807, 0.11171586066484451, -0.025513673201203346,
    0.004378428682684898, -0.0005396304768510163, 4.434783841134049e-05, -2.146842234651558e-06,
    4.588406454786309e-08,
)  # fmt: skip
TANH_ENDS = 5.2
TANH = (0.9999354481697083, 0.10179536044597626, 0.0006515858694911003)  # over (1, *TANH_BELOW)
TANH_BELOW = (1.0, 0.43474477529525757, 0.012630150653421879)


def exp_at_most_one(b: Bindings, x: Expr) -> Expr:
    """e**x for x <= 0 or NaN."""
    power, bits = _powers(b, b(_at_least(b(x), LEAST_EXP)), 127)
    return power * T.reinterpret("float32", bits)


def exp(b: Bindings, x: Expr) -> Expr:
    """e**x; powers of two are half as large as they should be, since 2**128 is no float32."""
    x = b(clamp(b(x), LEAST_EXP_BESIDE_ONE, MOST_EXP))
    power, bits = _powers(b, x, 126, 2.0)
    return power * T.reinterpret("float32", bits)


def sigmoid(b: Bindings, x: Expr) -> Expr:
    return f32(1.0) / (b(exp(b, f32(-1.0) * b(x))) + f32(1.0))


def erf(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    return clamp(b(x * horner(b(x * x), ERF)), -1.0, 1.0)


def tanh(b: Bindings, x: Expr) -> Expr:
    x = b(clamp(b(x), -TANH_ENDS, TANH_ENDS))
    square = b(x * x)
    return clamp(b(x * horner(square, TANH) / horner(square, TANH_BELOW)), -1.0, 1.0)


def _at_least(x: Expr, low: float) -> Expr:
    """NaN stays NaN."""
    return T.Select(x < f32(low), f32(low), x)


def _powers(b: Bindings, x: Expr, bias: int, factor: float = 1.0) -> tuple[Expr, Expr]:
    """(factor 2**r, bits of 2**(n + bias - 127)) with x log2 e = n + r and |r| <= 1 / 2.

    The product that r is the rest of is rounded once where products and sums are one instruction;
    twice, it is off by up to 2**-18.
    """
    shifted = b(x * f32(LOG2E) + f32(MAGIC + bias))
    n = b(shifted - f32(MAGIC + bias))
    r = b(x * f32(LOG2E) - n)
    bits = T.shift_left(T.reinterpret("int32", shifted), i32(23))
    return b(horner(r, [factor * c for c in EXP2])), bits
