"""Activation functions and their gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.registry import PROMOTION, OpCall, elementwise, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments

if TYPE_CHECKING:
    from torch_pruner.dynamo.lower.aten.value import Number, Value

aten = torch.ops.aten

_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


@rule(aten.gelu.default)
def gelu(_call: OpCall, x: Value, approximate: str = "none") -> Value:
    wide = x.widened()
    if approximate == "tanh":
        inner = _TANH_SCALE * (wide + _TANH_CUBIC * (wide * wide * wide))
        return 0.5 * wide * (1.0 + inner.apply("tanh"))
    return 0.5 * wide * (1.0 + (wide * math.sqrt(0.5)).apply("erf"))


@rule(aten.gelu_backward.default)
def gelu_backward(_call: OpCall, grad: Value, x: Value, approximate: str = "none") -> Value:
    g, wide = grad.widened(), x.widened()
    if approximate == "tanh":
        square = wide * wide
        inner = _TANH_SCALE * (wide + _TANH_CUBIC * square * wide)
        tanh = inner.apply("tanh")
        slope = _TANH_SCALE * (1.0 + 3 * _TANH_CUBIC * square)
        return g * (0.5 * (1.0 + tanh) + 0.5 * wide * (1.0 - tanh * tanh) * slope)
    cdf = 0.5 * (1.0 + (wide * math.sqrt(0.5)).apply("erf"))
    pdf = (wide * wide * -0.5).apply("exp") * (1 / math.sqrt(2 * math.pi))
    return g * (cdf + wide * pdf)


@rule(aten.silu.default)
def silu(_call: OpCall, x: Value) -> Value:
    wide = x.widened()
    return wide / (1.0 + (-wide).apply("exp"))


@rule(aten.silu_backward.default)
def silu_backward(_call: OpCall, grad: Value, x: Value) -> Value:
    g, wide = grad.widened(), x.widened()
    sigmoid = wide.apply("sigmoid")
    return g * sigmoid * (1.0 + wide * (1.0 - sigmoid))


@rule(aten.sigmoid_backward.default)
def sigmoid_backward(_call: OpCall, grad: Value, out: Value) -> Value:
    return elementwise(lambda g, y: g * (1.0 - y) * y, grad, out)


@rule(aten.tanh_backward.default)
def tanh_backward(_call: OpCall, grad: Value, out: Value) -> Value:
    return elementwise(lambda g, y: g * (1.0 - y * y), grad, out)


@rule(aten.threshold_backward.default)
def threshold_backward(_call: OpCall, grad: Value, x: Value, threshold: Number) -> Value:
    return elementwise(lambda g, v: (v <= threshold).where(0, g), grad, x)


@rule(aten.threshold.default)
def threshold(_call: OpCall, x: Value, threshold: Number, value: Number) -> Value:
    return (x <= threshold).where(value, x)


@rule(aten.hardtanh.default)
def hardtanh(_call: OpCall, x: Value, low: Number = -1.0, high: Number = 1.0) -> Value:
    return x.maximum(low).minimum(high)


@rule(aten.relu6.default)
def relu6(call: OpCall, x: Value) -> Value:
    return hardtanh(call, x, 0.0, 6.0)


@rule(aten.hardsigmoid.default)
def hardsigmoid(_call: OpCall, x: Value) -> Value:
    return (x.widened() + 3.0).maximum(0.0).minimum(6.0) * (1.0 / 6.0)


@rule(aten.hardswish.default)
def hardswish(_call: OpCall, x: Value) -> Value:
    wide = x.widened()
    return wide * (wide + 3.0).maximum(0.0).minimum(6.0) * (1.0 / 6.0)


@rule(aten.leaky_relu.default)
def leaky_relu(_call: OpCall, x: Value, slope: Number = 0.01) -> Value:
    wide = x.widened()
    return (wide > 0.0).where(wide, wide * slope)


@rule(aten.prelu.default, aten._prelu_kernel.default)
def prelu(_call: OpCall, x: Value, weight: Value) -> Value:
    wide, slope = x.widened(), weight.widened()
    if slope.ndim == 1 and wide.ndim >= 2:
        slope = slope.reshape((1, slope.shape[0], *[1] * (wide.ndim - 2)))
    return (wide > 0.0).where(wide, wide * slope)


@rule(aten.elu.default)
def elu(
    _call: OpCall, x: Value, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1
) -> Value:
    wide = x.widened()
    negative = (wide * input_scale).apply("expm1") * (alpha * scale)
    return (wide > 0.0).where(wide * scale, negative)


@rule(aten.softplus.default)
def softplus(_call: OpCall, x: Value, beta: Number = 1, threshold: Number = 20) -> Value:
    wide = x.widened()
    scaled = wide * beta
    return (scaled > threshold).where(wide, scaled.apply("exp").apply("log1p") / beta)


@rule(aten.mish.default)
def mish(call: OpCall, x: Value) -> Value:
    wide = x.widened()
    return wide * softplus(call, wide).apply("tanh")


@rule(aten.glu.default)
def glu(_call: OpCall, x: Value, dim: int = -1) -> Value:
    axis = dim % x.ndim
    half = x.shape[axis] // 2
    wide = x.widened()
    return wide.narrow(axis, 0, half) * wide.narrow(axis, half, half).apply("sigmoid")


def shifted_exponential(x: Value, axis: int) -> tuple[Value, Value, Value]:
    """``x - max``, its exponential, and the sum of that over ``axis`` (kept)."""
    shifted = x - x.reduce("max", (axis,), keepdim=True)
    powers = shifted.apply("exp")
    return shifted, powers, powers.sum((axis,), keepdim=True)


@rule(aten._softmax.default)
def softmax(_call: OpCall, x: Value, dim: int, half_to_float: bool = False) -> Value:
    del half_to_float
    if x.ndim == 0:
        return x.const(1.0) + x.widened() * 0.0
    _, powers, total = shifted_exponential(x.widened(), dim % x.ndim)
    return powers / total


@rule(aten._log_softmax.default)
def log_softmax(_call: OpCall, x: Value, dim: int, half_to_float: bool = False) -> Value:
    del half_to_float
    if x.ndim == 0:
        return x.widened() * 0.0
    shifted, _, total = shifted_exponential(x.widened(), dim % x.ndim)
    return shifted - total.apply("log")


@rule(aten._safe_softmax.default)
def safe_softmax(call: OpCall, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    if x.ndim == 0 or dtype is not None:
        raise arguments("_safe_softmax of a scalar or with a dtype")
    wide, axis = x.widened(), dim % x.ndim
    top = wide.reduce("max", (axis,), keepdim=True)
    powers = (wide - top.equals(-math.inf).where(0.0, top)).apply("exp")
    total = powers.sum((axis,), keepdim=True)  # 0 where nothing is visible: the result is 0, too
    return powers / total.equals(0.0).where(1.0, total)


@rule(aten._softmax_backward_data.default)
def softmax_backward(
    _call: OpCall, grad: Value, out: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    del input_dtype
    g, y = grad.widened(), out.widened()
    if y.ndim == 0:
        return (g - g) * y
    product = g * y
    return product - y * product.sum((dim % y.ndim,), keepdim=True)


@rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(
    _call: OpCall, grad: Value, out: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    del input_dtype
    g, y = grad.widened(), out.widened()
    if y.ndim == 0:
        return g - g
    return g - y.apply("exp") * g.sum((dim % y.ndim,), keepdim=True)


@rule(aten.logit.default)
def logit(_call: OpCall, x: Value, eps: float | None = None) -> Value:
    def fn(v: Value) -> Value:
        inner = v if eps is None else v.maximum(eps).minimum(1.0 - eps)
        return (inner / (1.0 - inner)).apply("log")

    return elementwise(fn, x, kind=PROMOTION.INT_TO_FLOAT)
