"""Float32 elementary functions as branch-free TIR expressions.

In: a float32 expression. Out: a float32 expression of additions, multiplications, selects and
integer operations on the bits, which ``VectorizeLoop`` and LLVM turn into vector instructions;
TVM's own ``exp``, ``erf`` and the like become one library call per element. TVM's simplifier treats
floats as reals, ``(x + c) - c`` becomes ``x``, so every rounding that a formula relies on is bound
to a variable.

Coefficients are least-maximum fits of the relative error, lowest power first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tvm.ir.op import Op, register_op_attr

from torch_pruner.codegen.tir.builders import Call, Expr, T, Var

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LOG2E = 1.4426950408889634
_LN2_HI, _LN2_LO = 0.693359375, -2.1219444005469057e-4  # the high part has nine bits
MAGIC, MAGIC_BITS = (
    12582912.0,
    0x4B400000,
)  # adding 1.5 * 2**23 rounds to an integer, left in the low bits
_SQRT_HALF_BITS = 0x3F3504F3
_LEAST_EXP = -88.0  # its power of two rounds to 2**-127, whose bits are those of 0
_LEAST_EXP_BESIDE_ONE = -87.3  # to 2**-126, half of which has the bits of 0
_MOST_EXP = 88.9  # infinity
_WIDE = 2.0**28  # to which adding one changes nothing
_TINY = 1.1754943508222875e-38

_EXPM1 = (
    0.4999999701976776,
    0.16666539013385773,
    0.04166722297668457,
    0.008367180824279785,
    0.0013882395578548312,
)
_EXP2 = (
    0.6931471824645996, 0.24022650718688965, 0.0555032454431057,
    0.009617999196052551, 0.0013401611940935254, 0.00015477764827664942,
)  # fmt: skip
_LOG = (
    0.3333333134651184, -0.25000837445259094, 0.2000129222869873, -0.16622765362262726,
    0.14199694991111755, -0.13164184987545013, 0.1277911514043808, -0.076461061835289,
)  # fmt: skip
_ERF = (  # erf(x) / x in x**2, |x| < 0.9
    1.1283791065216064, -0.3761252462863922, 0.11282142996788025,
    -0.02677898481488228, 0.005012082867324352, -0.0006091013783589005,
)  # fmt: skip
_LOG2_ERFC = (  # 0.85 < x < 4
    -0.00016546304686926305, -1.6273823976516724, -0.9184219241142273, -0.15068678557872772,
    0.03243036940693855, -0.00448272842913866, 0.0002921869745478034,
)  # fmt: skip
_ERFCX = (  # exp(x**2) erfc(x) (1 + 2 x) in (x - 3) / (x + 3)
    1.2530080080032349, -0.1356211155653, -0.04756239429116249, 0.12964537739753723,
    -0.11927148699760437, 0.06830649822950363, -0.023788152262568474, 0.0025270231999456882,
    0.0019490438280627131, -0.0007374986307695508, -0.00017775717424228787, 3.7032201362308115e-05,
)  # fmt: skip


def _identity(call: Call) -> Expr:
    """An LLVM intrinsic that is folded away but that TVM's analyzer does not look into."""
    value, dtype = call.args[0], str(call.ty.dtype)
    if "float" in dtype:
        return T.call_llvm_intrin(call.ty, "llvm.powi", value, T.const(1, "int32"))
    return T.call_llvm_intrin(call.ty, "llvm.umax", value, T.const(0, call.ty))


# TVM's analyzer replaces a variable of a pure value by that value wherever it meets the variable,
# which takes time exponential in the number of definitions. An operator that "reads state" stops
# it in the passes, and ``spill`` removes the definitions before code generation.
KEEP = "torch_pruner.keep"
register_op_attr(KEEP, "TCallEffectKind", T.CallEffectKind.ReadState.value)
register_op_attr(KEEP, "TVectorizable", True)
T.register_intrin_lowering(KEEP, target="llvm", f=_identity)
T.register_intrin_lowering(KEEP, target="cuda", f=lambda call: call.args[0])


def unseen(value: Expr) -> Expr:
    """The value, into which TVM's analyzer does not look."""
    return T.call_intrin(value.ty, Op.get(KEEP), value)


class Bindings:
    """Collects variables for subexpressions; ``close`` wraps a result in their ``Let``s.

    A TIR expression that uses a subexpression twice is a tree for every pass, so nesting without
    variables grows exponentially. Bound values hold no ``Let`` themselves: a bound ``Let`` is
    hoisted, once, because TVM's analyzer must not see two definitions of a variable.
    """

    def __init__(self) -> None:
        self._bound: dict[int, tuple[Var, Expr]] = {}

    def __call__(self, value: Expr) -> Expr:
        value = self.hoist(value)
        if isinstance(value, (T.Var, T.IntImm, T.FloatImm)) or value.ty.dtype == "bool":
            return value  # TVM's analyzer fails on a variable that is a vector of bool
        var = T.Var("t", value.ty)
        self._bound[var.id_] = var, unseen(value)
        return var

    def close(self, result: Expr) -> Expr:
        result = self.hoist(result)
        for var, value in reversed(self._bound.values()):
            result = T.Let(var, value, result)
        return result

    def hoist(self, value: Expr) -> Expr:
        """The body of a ``Let``, whose variables join the collection."""
        while isinstance(value, T.Let):
            self._bound.setdefault(value.var.id_, (value.var, value.value))
            value = value.body
        return value


def f32(value: float) -> Expr:
    return T.const(value, "float32")


def i32(value: int) -> Expr:
    return T.const(value, "int32")


def clamp(x: Expr, low: float, high: float) -> Expr:
    """NaN stays NaN."""
    return T.Select(x > f32(high), f32(high), T.Select(x < f32(low), f32(low), x))


def horner(x: Expr, coefficients: Sequence[float]) -> Expr:
    total = f32(coefficients[-1])
    for value in reversed(coefficients[:-1]):
        total = total * x + f32(value)
    return total


def _bits(x: Expr) -> Expr:
    return T.reinterpret("int32", x)


def _power_of_two(n: Expr) -> Expr:
    """2**n for -127 <= n <= 128, of which the ends give 0 and infinity."""
    return T.reinterpret("float32", T.shift_left(n + i32(127), i32(23)))


def with_sign(magnitude: Expr, x: Expr) -> Expr:
    """``magnitude``, which is not negative, with the sign of ``x``.

    No ``copysign``: TVM takes a statement with it apart, lane by lane, and all that it computes.
    And no masks of bits, of which LLVM makes what comes out wrong beside ``x`` itself (``bits``).
    """
    return T.Select(_bits(x) < i32(0), f32(-1.0) * magnitude, magnitude)


def _round(b: Bindings, scaled: Expr) -> tuple[Expr, Expr]:
    """The nearest integer as float32 and as int32. NaN gives NaN and any integer."""
    shifted = b(scaled + f32(MAGIC))
    return b(shifted - f32(MAGIC)), b(_bits(shifted) - i32(MAGIC_BITS))


def _reduce_exp(b: Bindings, x: Expr, correction: Expr | None = None) -> tuple[Expr, Expr]:
    """(e**r - 1, n) with x + correction = n ln 2 + r and |r| <= ln 2 / 2."""
    n, k = _round(b, b(x * f32(_LOG2E)))
    high = b(x - n * f32(_LN2_HI))
    r = b(high - n * f32(_LN2_LO))
    if correction is not None:
        r = b(r + correction)
    return b(r * r * horner(r, _EXPM1) + r), k


def _reduce_exp2(b: Bindings, x: Expr) -> tuple[Expr, Expr]:
    """(2**r - 1, n) with x = n + r and |r| <= 1 / 2."""
    n, k = _round(b, x)
    r = b(x - n)
    return b(r * horner(r, _EXP2)), k


def _scale(b: Bindings, x: Expr, n: Expr) -> Expr:
    """x * 2**n for |n| <= 252, through denormals and to infinity."""
    half = b(T.shift_right(n, i32(1)))
    return x * _power_of_two(half) * _power_of_two(n - half)


def exp(b: Bindings, x: Expr) -> Expr:
    m, n = _reduce_exp(b, b(clamp(b(x), -104.0, 89.5)))
    return _scale(b, b(m + f32(1.0)), n)


def exp_at_most_one(b: Bindings, x: Expr) -> Expr:
    """e**x for x <= 0 or NaN, 0 below 2**-126.5: 13 instructions where ``exp`` has 23."""
    x = b(T.Select(x < f32(_LEAST_EXP), f32(_LEAST_EXP), x))
    r, power = _powers_of_two(b, x, 127)
    return horner(r, (1.0, 1.0, *_EXPM1)) * power


def exp_beside_one(b: Bindings, x: Expr) -> Expr:
    """e**x, 0 where it is below 2**-125.5, which is lost beside 1: 15 instructions.

    Powers of two are half as large, as 2**128 is no float32. The polynomial is as parallel as its
    squares allow: an epilogue has a few vectors at a time, which wait for each other's results.
    """
    x = b(x)
    x = b(T.Select(x < f32(_LEAST_EXP_BESIDE_ONE), f32(_LEAST_EXP_BESIDE_ONE), x))
    r, power = _powers_of_two(b, b(T.Select(x > f32(_MOST_EXP), f32(_MOST_EXP), x)), 126)
    square = b(r * r)
    c2, c3, c4, c5, c6 = (f32(2.0 * c) for c in _EXPM1)
    rest = square * (square * c6 + (r * c5 + c4)) + (r * c3 + c2)
    return (square * rest + (r * f32(2.0) + f32(2.0))) * power


def _powers_of_two(b: Bindings, x: Expr, bias: int) -> tuple[Expr, Expr]:
    """(r, 2**(n + bias - 127)) with x = n ln 2 + r and |r| <= ln 2 / 2; of the least power, 0.

    The number that rounds x / ln 2 to an integer leaves the exponent's bits, bias included.
    """
    shifted = b(x * f32(_LOG2E) + f32(MAGIC + bias))
    n = b(shifted - f32(MAGIC + bias))
    r = b(b(x - n * f32(_LN2_HI)) - n * f32(_LN2_LO))
    return r, b(T.reinterpret("float32", T.shift_left(_bits(shifted), i32(23))))


def exp2(b: Bindings, x: Expr) -> Expr:
    m, n = _reduce_exp2(b, b(clamp(b(x), -151.0, 129.0)))
    return _scale(b, b(m + f32(1.0)), n)


def _expm1(b: Bindings, x: Expr) -> Expr:
    """For -17.5 <= x <= 89."""
    m, n = _reduce_exp(b, x)
    half = b(_power_of_two(n - i32(1)))  # 2**128 is no float32
    result = b(half * m + (half - f32(0.5)))
    return result + result


def expm1(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    return T.Select(T.EQ(x, f32(0.0)), x, _expm1(b, b(clamp(x, -17.5, 89.0))))


def sinh(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    a = b(T.abs(x))
    near = b(_expm1(b, b(clamp(a, 0.0, 20.0))))
    far = b(exp(b, b(f32(0.5) * a)))  # its square may be infinite where half of that is not
    value = T.Select(
        a > f32(20.0), f32(0.5) * far * far, f32(0.5) * (near + near / (near + f32(1.0)))
    )
    return with_sign(b(value), x)


def cosh(b: Bindings, x: Expr) -> Expr:
    a = b(T.abs(b(x)))
    near = b(exp(b, b(clamp(a, 0.0, 20.0))))
    far = b(exp(b, b(f32(0.5) * a)))
    return T.Select(a > f32(20.0), f32(0.5) * far * far, f32(0.5) * near + f32(0.5) / near)


def atanh(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    a = b(T.abs(x))
    return with_sign(b(f32(0.5) * log1p(b, b((a + a) / (f32(1.0) - a)))), x)


def asinh(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    a = b(T.abs(x))
    near = b(clamp(a, 0.0, _WIDE))  # whose square is no infinity
    square = b(near * near)
    return with_sign(b(_log_twice(b, a, near + square / (f32(1.0) + T.sqrt(square + f32(1.0))))), x)


def acosh(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    t = b(clamp(x, 0.0, _WIDE) - f32(1.0))
    value = b(_log_twice(b, x, t + T.sqrt(t * (t + f32(2.0)))))
    return T.Select(x < f32(1.0), f32(math.nan), value)


def _log_twice(b: Bindings, x: Expr, t: Expr) -> Expr:
    """log(1 + t), or log(2 x) where x is so large that it is what 1 + t comes to."""
    far = x > f32(_WIDE)
    log = b(log1p(b, b(T.Select(far, x, t))))
    return log + T.Select(far, f32(math.log(2)), f32(0.0))


def sigmoid(b: Bindings, x: Expr) -> Expr:
    return f32(1.0) / (b(exp_beside_one(b, f32(-1.0) * b(x))) + f32(1.0))


def tanh(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    a = b(clamp(T.abs(x), 0.0, 10.0))
    e = b(_expm1(b, b(a + a)))
    return with_sign(e / (e + f32(2.0)), x)


def _split_log(b: Bindings, x: Expr) -> tuple[Expr, Expr, Expr]:
    """(n, f, c) with log x = n ln 2 + f + c for normal positive x, |f| < 0.42 and small c."""
    shifted = b(_bits(x) - i32(_SQRT_HALF_BITS))  # wraps for negative x only
    n = b(T.Cast("float32", T.shift_right(shifted, i32(23))))
    mantissa = T.bitwise_and(shifted, i32(0x7FFFFF)) + i32(_SQRT_HALF_BITS)
    f = b(T.reinterpret("float32", mantissa) - f32(1.0))
    return n, f, b(f * f * (f * horner(f, _LOG) - f32(0.5)))


def _log(b: Bindings, x: Expr, combine: Callable[[Expr, Expr, Expr], Expr]) -> Expr:
    x = b(x)
    denormal = x < f32(_TINY)
    n, f, c = _split_log(b, b(T.Select(denormal, x * f32(2.0**23), x)))
    n = b(n - T.Select(denormal, f32(23.0), f32(0.0)))
    return _log_limits(x, b(combine(n, f, c)), 0.0)


def _log_limits(x: Expr, result: Expr, pole: float) -> Expr:
    at_pole = T.Select(T.EQ(x, f32(pole)), f32(-math.inf), f32(math.nan))
    return T.Select(x > f32(pole), T.Select(x < f32(math.inf), result, x), at_pole)


def log(b: Bindings, x: Expr) -> Expr:
    return _log(b, x, lambda n, f, c: b(n * f32(_LN2_LO) + c) + f + n * f32(_LN2_HI))


def log2(b: Bindings, x: Expr) -> Expr:
    high, low = 1.4423828125, _LOG2E - 1.4423828125

    def combine(n: Expr, f: Expr, c: Expr) -> Expr:
        return b((f + c) * f32(low) + c * f32(high)) + f * f32(high) + n

    return _log(b, x, combine)


def log10(b: Bindings, x: Expr) -> Expr:
    two_high, e_high = 0.30078125, 0.43359375
    two_low, e_low = math.log10(2) - two_high, math.log10(math.e) - e_high

    def combine(n: Expr, f: Expr, c: Expr) -> Expr:
        small = b(n * f32(two_low) + ((f + c) * f32(e_low) + c * f32(e_high)))
        return small + f * f32(e_high) + n * f32(two_high)

    return _log(b, x, combine)


def log1p(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    u = b(x + f32(1.0))
    lost = b(x - b(u - f32(1.0)))
    n, f, c = _split_log(b, u)
    small = b(n * f32(_LN2_LO) + (c + lost / u))
    result = b(small + f + n * f32(_LN2_HI))
    return T.Select(T.EQ(x, f32(0.0)), x, _log_limits(x, result, -1.0))


def erf(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    magnitude = b(T.abs(x))
    a = b(T.Select(magnitude > f32(4.0), f32(4.0), magnitude))
    near = b(a * horner(b(a * a), _ERF))
    exponent = b(horner(a, _LOG2_ERFC))  # -27 at least
    shifted = b(exponent + f32(MAGIC + 127))
    r = b(exponent - b(shifted - f32(MAGIC + 127)))
    power = T.reinterpret("float32", T.shift_left(_bits(shifted), i32(23)))
    far = b(f32(1.0) - (b(r * horner(r, _EXP2)) + f32(1.0)) * power)
    return with_sign(T.Select(a < f32(0.9), near, far), x)


def erfc(b: Bindings, x: Expr) -> Expr:
    x = b(x)
    a = b(clamp(T.abs(x), 0.0, 10.1))
    high = b(T.reinterpret("float32", T.bitwise_and(_bits(a), i32(-4096))))
    square = b(a * a)
    lost = b(b(high * high) - square)
    lost = b(b(a - high) * (a + high) + lost)
    m, n = _reduce_exp(b, b(f32(0.0) - square), b(f32(-1.0) * lost))
    t = b(b(a - f32(3.0)) / (a + f32(3.0)))
    tail = b(b((m + f32(1.0)) * horner(t, _ERFCX)) / (a + a + f32(1.0)))
    tail = b(_scale(b, tail, n))
    far = b(T.Select(x < f32(0.0), f32(2.0) - tail, tail))
    near = b(f32(1.0) - x * horner(square, _ERF))
    return T.Select(a < f32(0.5), near, far)
