"""Operators that work element by element."""

from __future__ import annotations

import math
from functools import reduce

import torch
import torch.nn.functional as F

from torch_pruner.onnx.operators.registry import TABLE, OperatorCall, Result, Tensor, op, wide

for _name, _function in {
    "Abs": torch.abs, "Neg": torch.neg, "Sign": torch.sign, "Sqrt": torch.sqrt, "Exp": torch.exp,
    "Log": torch.log, "Reciprocal": torch.reciprocal, "Sin": torch.sin, "Cos": torch.cos,
    "Tan": torch.tan, "Asin": torch.asin, "Acos": torch.acos, "Atan": torch.atan,
    "Sinh": torch.sinh, "Cosh": torch.cosh, "Tanh": torch.tanh, "Asinh": torch.asinh,
    "Acosh": torch.acosh, "Atanh": torch.atanh, "Erf": torch.erf, "Sigmoid": torch.sigmoid,
    "Not": torch.logical_not, "BitwiseNot": torch.bitwise_not, "IsNaN": torch.isnan,
    "Softsign": F.softsign, "Mish": F.mish, "Relu": torch.relu, "HardSwish": F.hardswish,
    "Identity": torch.clone,
}.items():  # fmt: skip
    TABLE[_name] = wide(lambda n, x, f=_function: f(x))
for _name, _binary in {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "And": torch.logical_and,
    "Or": torch.logical_or, "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor, "Equal": torch.eq,
    "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le,
}.items():  # fmt: skip
    TABLE[_name] = wide(lambda n, a, b, f=_binary: f(a, b))


@op("Identity")
def _identity(n: OperatorCall, x: Result) -> Result:
    return x.clone() if isinstance(x, Tensor) else x


@op("Ceil", "Floor", "Round")
def _whole(n: OperatorCall, x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x.clone()
    return {"Ceil": torch.ceil, "Floor": torch.floor, "Round": torch.round}[n.op](x)


def _div(n: OperatorCall, a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


TABLE["Div"] = wide(_div)


@op("Pow")
def _pow(n: OperatorCall, a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return torch.pow(a, b.to(a.dtype) if b.is_floating_point() else b).to(a.dtype)
    return torch.pow(a.double(), b.double()).to(a.dtype)


def _mod(n: OperatorCall, a: Tensor, b: Tensor) -> Tensor:
    return torch.fmod(a, b) if n.attr("fmod", 0) else torch.remainder(a, b)


TABLE["Mod"] = wide(_mod)


def _shift(n: OperatorCall, a: Tensor, b: Tensor) -> Tensor:
    left = n.attr("direction") == "LEFT"
    return torch.bitwise_left_shift(a, b) if left else torch.bitwise_right_shift(a, b)


TABLE["BitShift"] = wide(_shift)


@op("Max", "Min", "Sum", "Mean")
def _variadic(n: OperatorCall, *args: Tensor) -> Tensor:
    def fold(_: OperatorCall, *parts: Tensor) -> Tensor:
        if n.op == "Max":
            return reduce(torch.maximum, parts)
        if n.op == "Min":
            return reduce(torch.minimum, parts)
        total = reduce(torch.add, parts)
        return total / len(parts) if n.op == "Mean" else total

    return wide(fold)(n, *args) if len(args) > 1 else args[0].clone()


def _where(n: OperatorCall, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


TABLE["Where"] = wide(_where)


@op("IsInf")
def _is_inf(n: OperatorCall, x: Tensor) -> Tensor:
    found = torch.isinf(x)
    if not n.attr("detect_negative", 1):
        found = found & (x > 0)
    if not n.attr("detect_positive", 1):
        found = found & (x < 0)
    return found


def _clip(
    n: OperatorCall, x: Tensor, low: Tensor | None = None, high: Tensor | None = None
) -> Tensor:
    if n.opset < 11:
        return torch.clamp(x, n.attr("min"), n.attr("max"))
    x = torch.maximum(x, low) if low is not None else x
    return torch.minimum(x, high) if high is not None else x.clone()


TABLE["Clip"] = wide(_clip)


@op("LeakyRelu")
def _leaky(n: OperatorCall, x: Tensor) -> Tensor:
    return F.leaky_relu(x, n.attr("alpha", 0.01))


@op("Elu")
def _elu(n: OperatorCall, x: Tensor) -> Tensor:
    return F.elu(x, n.attr("alpha", 1.0))


@op("Celu")
def _celu(n: OperatorCall, x: Tensor) -> Tensor:
    return F.celu(x, n.attr("alpha", 1.0))


@op("Selu")
def _selu(n: OperatorCall, x: Tensor) -> Tensor:
    alpha = n.attr("alpha", 1.67326319217681884765625)
    gamma = n.attr("gamma", 1.05070102214813232421875)
    return torch.where(x > 0, gamma * x, gamma * (alpha * torch.exp(x) - alpha))


@op("HardSigmoid")
def _hard_sigmoid(n: OperatorCall, x: Tensor) -> Tensor:
    return torch.clamp(n.attr("alpha", 0.2) * x + n.attr("beta", 0.5), 0.0, 1.0)


@op("ThresholdedRelu")
def _thresholded(n: OperatorCall, x: Tensor) -> Tensor:
    return torch.where(x > n.attr("alpha", 1.0), x, torch.zeros_like(x))


@op("Softplus")
def _softplus(n: OperatorCall, x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


@op("Gelu")
def _gelu(n: OperatorCall, x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh" if n.attr("approximate", "none") == "tanh" else "none")


@op("Swish")
def _swish(n: OperatorCall, x: Tensor) -> Tensor:
    return x * torch.sigmoid(n.attr("alpha", 1.0) * x)


@op("SwiGLU")
def _swiglu(n: OperatorCall, x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(n.attr("alpha", 1.0) * x) * y


@op("PRelu")
def _prelu(n: OperatorCall, x: Tensor, slope: Tensor) -> Tensor:
    def apply(_: OperatorCall, a: Tensor, s: Tensor) -> Tensor:
        return torch.where(a >= 0, a, a * s)

    return wide(apply)(n, x, slope)


@op("Shrink")
def _shrink(n: OperatorCall, x: Tensor) -> Tensor:
    bias, limit = n.attr("bias", 0.0), n.attr("lambd", 0.5)
    zero = torch.zeros_like(x)
    return torch.where(x < -limit, x + bias, torch.where(x > limit, x - bias, zero)).to(x.dtype)


@op("Dropout")
def _dropout(
    n: OperatorCall, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None
) -> Result:
    share = n.attr("ratio", 0.5) if n.opset < 12 else n.scalar(1, 0.5)
    active = bool(n.scalar(2, False)) if n.opset >= 12 else False
    mask = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    if active and share > 0:
        mask = torch.rand(x.shape, device=x.device) >= share
        return torch.where(mask, x / (1 - share), torch.zeros_like(x)), mask
    return x.clone(), mask


@op("Softmax", "LogSoftmax", "Hardmax")
def _softmax(n: OperatorCall, x: Tensor) -> Tensor:
    rank = x.dim()
    axis = n.attr("axis", -1 if n.opset >= 13 else 1)
    whole = x
    if n.opset < 13:  # of everything from this axis on
        axis = axis + rank if axis < 0 else axis
        whole = x.reshape(math.prod(x.shape[:axis]), -1)
        axis = 1
    if n.op == "Hardmax":
        best = torch.argmax(whole, dim=axis, keepdim=True)
        result = torch.zeros_like(whole).scatter(axis, best, 1.0)
    else:
        function = torch.softmax if n.op == "Softmax" else torch.log_softmax
        result = function(whole, dim=axis)
    return result.reshape(x.shape)
