"""Arithmetic, comparison, logic and selection, element by element."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.registry import (
    PROMOTION,
    OpCall,
    Operand,
    elementwise,
    foreign_rule,
    rule,
)
from torch_pruner.dynamo.lower.aten.rejection import arguments
from torch_pruner.dynamo.lower.aten.value import Number, Value

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten

_FLOATING = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sin",
    "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf",
    "erfc", "sigmoid",
)  # fmt: skip
_KEEPING = ("neg", "abs", "sign", "relu")
_ROUNDING = ("floor", "ceil", "trunc", "round")
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")


def _unary(name: str, kind: PROMOTION) -> Callable[..., Value]:
    return lambda _call, x: elementwise(lambda v: v.apply(name), x, kind=kind)


def _rounding(name: str) -> Callable[..., Value]:
    return lambda _call, x: x.widened().apply(name) if x.is_float else x


def _comparing(name: str) -> Callable[..., Value]:
    return lambda _call, a, b: elementwise(lambda x, y: x.apply(name, y), a, b)


def _binary(name: str, kind: PROMOTION = PROMOTION.DEFAULT) -> Callable[..., Value]:
    return lambda _call, a, b: elementwise(lambda x, y: x.apply(name, y), a, b, kind=kind)


def _bitwise(name: str) -> Callable[..., Value]:
    def combine(x: Value, y: Value) -> Value:
        return x.apply(f"logical_{name}" if x.dtype == "bool" else f"bitwise_{name}", y)

    return lambda _call, a, b: elementwise(combine, a, b)


def _logical(name: str) -> Callable[..., Value]:
    return lambda _call, a, b: a.cast("bool").apply(f"logical_{name}", b.cast("bool"))


for _name in _FLOATING:
    rule(getattr(aten, _name).default)(_unary(_name, PROMOTION.INT_TO_FLOAT))
for _name in _KEEPING:
    rule(getattr(aten, _name).default)(_unary(_name, PROMOTION.DEFAULT))
for _name in _ROUNDING:
    rule(getattr(aten, _name).default)(_rounding(_name))
for _name in _COMPARING:
    rule(getattr(aten, _name).Tensor, getattr(aten, _name).Scalar)(_comparing(_name))
for _name in ("and", "or", "xor"):
    _op = getattr(aten, f"bitwise_{_name}")
    rule(_op.Tensor, _op.Scalar, _op.Scalar_Tensor)(_bitwise(_name))
    rule(getattr(aten, f"logical_{_name}").default)(_logical(_name))
rule(aten.maximum.default)(_binary("maximum"))
rule(aten.minimum.default)(_binary("minimum"))
rule(aten.atan2.default)(_binary("atan2", PROMOTION.INT_TO_FLOAT))
rule(aten.mul.Tensor, aten.mul.Scalar)(
    lambda _call, a, b: elementwise(lambda x, y: x & y if x.dtype == "bool" else x * y, a, b)
)


@rule(aten.add.Tensor, aten.add.Scalar)
def add(_call: OpCall, a: Operand, b: Operand, alpha: Number = 1) -> Value:
    def combine(x: Value, y: Value) -> Value:
        if x.dtype == "bool":
            return x | (y if alpha else y.const(False))
        return x + (y if alpha == 1 else y * alpha)

    return elementwise(combine, a, b)


@rule(aten.sub.Tensor, aten.sub.Scalar)
def sub(_call: OpCall, a: Operand, b: Operand, alpha: Number = 1) -> Value:
    return elementwise(lambda x, y: x - (y if alpha == 1 else y * alpha), a, b)


@rule(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(_call: OpCall, a: Operand, b: Operand, alpha: Number = 1) -> Value:
    return elementwise(lambda x, y: y - (x if alpha == 1 else x * alpha), a, b)


@rule(aten.div.Tensor, aten.div.Scalar)
def div(_call: OpCall, a: Operand, b: Operand) -> Value:
    return elementwise(lambda x, y: x / y, a, b, kind=PROMOTION.INT_TO_FLOAT)


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(call: OpCall, a: Operand, b: Operand, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return div(call, a, b)

    def combine(x: Value, y: Value) -> Value:
        call.demand_divisor(y)
        if rounding_mode == "floor":
            return x.apply("floordiv", y)
        return (x / y).apply("trunc") if x.is_float else x.apply("truncdiv", y)

    return elementwise(combine, a, b)


def _quotient(call: OpCall, op: str, a: Operand, b: Operand) -> Value:
    def combine(x: Value, y: Value) -> Value:
        call.demand_divisor(y)
        return x.apply(op, y)

    return elementwise(combine, a, b)


@rule(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(call: OpCall, a: Operand, b: Operand) -> Value:
    return _quotient(call, "floordiv", a, b)


@rule(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(call: OpCall, a: Operand, b: Operand) -> Value:
    return _quotient(call, "mod", a, b)


@rule(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(call: OpCall, a: Operand, b: Operand) -> Value:
    return _quotient(call, "fmod", a, b)


@rule(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(_call: OpCall, a: Operand, b: Operand) -> Value:
    if isinstance(a, (int, float)) and a == 2 and isinstance(b, Value) and b.is_float:
        return b.apply("exp2")
    return elementwise(lambda x, y: x.apply("pow", y), a, b)


@rule(aten.pow.Tensor_Scalar)
def power_scalar(_call: OpCall, a: Value, exponent: Number) -> Value:
    def raised(x: Value, e: Value) -> Value:
        if exponent == 0:
            return x.const(1).broadcast(x.shape)
        if exponent in (1, 2, 3):
            square = x * x if exponent > 1 else x
            return square * x if exponent == 3 else square
        if x.is_float and exponent in (0.5, -0.5, -1, -2):
            names = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
            return x.apply(names[exponent]) if exponent != -2 else 1.0 / (x * x)
        return x.apply("pow", e)

    return elementwise(raised, a, exponent)


@rule(aten.bitwise_not.default)
def bitwise_not(_call: OpCall, x: Value) -> Value:
    return ~x if x.dtype == "bool" else x.apply("bitwise_not")


@rule(aten.logical_not.default)
def logical_not(_call: OpCall, x: Value) -> Value:
    return ~x.cast("bool")


@rule(aten.isnan.default)
def isnan(_call: OpCall, x: Value) -> Value:
    return x.isnan() if x.is_float else x.cast("bool") & x.const(0).cast("bool")


@rule(aten.isinf.default)
def isinf(_call: OpCall, x: Value) -> Value:
    return x.apply("isinf", dtype="bool") if x.is_float else isnan(_call, x)


@rule(aten.isfinite.default)
def isfinite(_call: OpCall, x: Value) -> Value:
    bad = isnan(_call, x) | isinf(_call, x)
    return ~bad


@rule(aten.round.decimals)
def round_decimals(_call: OpCall, x: Value, decimals: int = 0) -> Value:
    if not x.is_float:
        return x
    wide, scale = x.widened(), 10.0 ** abs(decimals)
    if decimals >= 0:
        return (wide * scale).apply("round") / scale if decimals else wide.apply("round")
    return (wide / scale).apply("round") * scale


@rule(
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.__lshift__.Tensor,
    aten.__lshift__.Scalar,
)
def shift_left(_call: OpCall, a: Operand, b: Operand) -> Value:
    return elementwise(lambda x, y: x.apply("shift_left", y), a, b)


@rule(
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
)
def shift_right(_call: OpCall, a: Operand, b: Operand) -> Value:
    return elementwise(lambda x, y: x.apply("shift_right", y), a, b)


@rule(aten.clamp.default)
def clamp(
    _call: OpCall,
    x: Value,
    low: Operand | None = None,
    high: Operand | None = None,
    **bounds: Operand,
) -> Value:
    low, high = bounds.get("min", low), bounds.get("max", high)

    def bound(v: Value, *limits: Value) -> Value:
        rest = list(limits)
        if low is not None:
            v = v.maximum(rest.pop(0))
        return v.minimum(rest.pop(0)) if high is not None else v

    given = [limit for limit in (low, high) if limit is not None]
    if any(isinstance(limit, float) and math.isnan(limit) for limit in given):
        raise arguments("clamp with a NaN bound")
    return elementwise(bound, x, *given)


@rule(aten.clamp.Tensor)
def clamp_tensor(
    call: OpCall,
    x: Value,
    low: Value | None = None,
    high: Value | None = None,
    **bounds: Value,
) -> Value:
    return clamp(call, x, bounds.get("min", low), bounds.get("max", high))


@rule(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(call: OpCall, x: Value, low: Operand) -> Value:
    return clamp(call, x, low)


@rule(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(call: OpCall, x: Value, high: Operand) -> Value:
    return clamp(call, x, None, high)


@rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
def where(_call: OpCall, condition: Value, a: Operand, b: Operand) -> Value:
    test = condition.cast("bool")
    return elementwise(lambda x, y: test.where(x, y), a, b, kind=PROMOTION.NO_OPMATH)


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(call: OpCall, x: Value, mask: Value, value: Operand) -> Value:
    fill = value.cast(x.dtype) if isinstance(value, Value) else call.const(value, x.dtype)
    return mask.where(fill, x)


@rule(aten.addcmul.default)
def addcmul(_call: OpCall, x: Value, a: Value, b: Value, value: Number = 1) -> Value:
    def combine(s: Value, p: Value, q: Value) -> Value:
        return s + (p * q if value == 1 else p * value * q)

    return elementwise(combine, x, a, b)


@foreign_rule("prims::fma")
def fma(_call: OpCall, a: Value, b: Value, c: Value) -> Value:
    """As inductor writes optimizers' steps; rounded once or twice, as compilers like it."""
    return elementwise(lambda p, q, s: p * q + s, a, b, c)


@rule(aten.addcdiv.default)
def addcdiv(_call: OpCall, x: Value, a: Value, b: Value, value: Number = 1) -> Value:
    def combine(s: Value, p: Value, q: Value) -> Value:
        return s + (p / q if value == 1 else p * value / q)

    return elementwise(combine, x, a, b)


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(_call: OpCall, start: Value, end: Value, weight: Operand) -> Value:
    def mix(a: Value, b: Value, w: Value) -> Value:
        near = w.apply("abs") < 0.5
        return near.where(a + w * (b - a), b - (b - a) * (1.0 - w))

    return elementwise(mix, start, end, weight)


def _of_numbers(call: OpCall, op: str, a: Value, b: Value) -> Value:
    """The larger or smaller, of a number and NaN the number. Of zeros of both signs eager takes the
    first, in half precision the second."""
    half = call.dtype in ("bfloat16", "float16")

    def combine(x: Value, y: Value) -> Value:
        either = x.apply(op, y) if half else y.apply(op, x)
        return x.isnan().where(y, y.isnan().where(x, either))

    return elementwise(combine, a, b)


@rule(aten.fmax.default)
def fmax(call: OpCall, a: Value, b: Value) -> Value:
    return _of_numbers(call, "maximum", a, b)


@rule(aten.fmin.default)
def fmin(call: OpCall, a: Value, b: Value) -> Value:
    return _of_numbers(call, "minimum", a, b)


@rule(aten.logaddexp.default)
def logaddexp(_call: OpCall, a: Value, b: Value) -> Value:
    def combine(x: Value, y: Value) -> Value:
        top = x.maximum(y)
        difference = (x - y).apply("abs")
        same = x.apply("isinf", dtype="bool") & x.equals(y)
        return same.where(x, top + (-difference).apply("exp").apply("log1p"))

    return elementwise(combine, a, b)


@rule(aten.nan_to_num.default)
def nan_to_num(
    _call: OpCall,
    x: Value,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Value:
    if not x.is_float:
        return x
    assert x.fake is not None
    limits = torch.finfo(x.fake.dtype)
    high = limits.max if posinf is None else posinf
    low = limits.min if neginf is None else neginf
    out = x.isnan().where(0.0 if nan is None else nan, x)
    out = x.equals(math.inf).where(high, out)
    return x.equals(-math.inf).where(low, out)
