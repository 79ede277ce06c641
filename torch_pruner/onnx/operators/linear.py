"""Products: matrices, convolutions, sums over named indices, and their integer forms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from torch_pruner.onnx.operators.registry import OperatorCall, Result, Tensor, in_range, op


@op("MatMul")
def _matmul(n: OperatorCall, a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point() or a.is_complex():
        return torch.matmul(a, b)
    return torch.matmul(a.to(torch.int64), b.to(torch.int64)).to(a.dtype)


@op("Gemm")
def _gemm(n: OperatorCall, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.T if n.attr("transA", 0) else a
    b = b.T if n.attr("transB", 0) else b
    alpha, beta = n.attr("alpha", 1.0), n.attr("beta", 1.0)
    if not a.is_floating_point():
        result = torch.matmul(a.to(torch.int64), b.to(torch.int64))
        result = result if alpha == 1 else (result * alpha).to(torch.int64)
        return (result if c is None else result + c * int(beta)).to(a.dtype)
    if c is not None and c.dim() == 1 and alpha == 1 and beta == 1 and c.shape[0] == b.shape[1]:
        return F.linear(a, b.T, c)
    result = torch.matmul(a, b)
    result = result * alpha if alpha != 1 else result
    return result if c is None else result + (c * beta if beta != 1 else c)


@op("Einsum")
def _einsum(n: OperatorCall, *args: Tensor) -> Tensor:
    return torch.einsum(n.attr("equation").replace(" ", ""), *args)


@op("Det")
def _det(n: OperatorCall, x: Tensor) -> Tensor:
    return torch.linalg.det(x)


def window(
    n: OperatorCall, rank: int, kernel: list[int], extent: list[int]
) -> tuple[list[int], ...]:
    """(stride, dilation, padding before, padding after) of a window over ``extent``."""
    stride = n.attr("strides") or [1] * rank
    dilation = n.attr("dilations") or [1] * rank
    auto = n.attr("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        low, high = [], []
        for d, k, s, r in zip(extent, kernel, stride, dilation, strict=True):
            total = max((-(-d // s) - 1) * s + r * (k - 1) + 1 - d, 0)
            less, more = total // 2, total - total // 2
            low.append(less if auto == "SAME_UPPER" else more)
            high.append(more if auto == "SAME_UPPER" else less)
        return stride, dilation, low, high
    pads = n.attr("pads") or [0] * (2 * rank) if auto != "VALID" else [0] * (2 * rank)
    return stride, dilation, list(pads[:rank]), list(pads[rank:])


_CONV = (F.conv1d, F.conv2d, F.conv3d)
_BACK = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def convolution(n: OperatorCall, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """The operator Conv on floats."""
    rank = x.dim() - 2
    kernel, extent = list(w.shape[2:]), list(x.shape[2:])
    stride, dilation, low, high = window(n, rank, kernel, extent)
    if low != high:
        x = F.pad(x, [p for pair in zip(low[::-1], high[::-1], strict=True) for p in pair])
        low = [0] * rank
    return _CONV[rank - 1](x, w, b, stride, low, dilation, n.attr("group", 1))


@op("Conv")
def _conv(n: OperatorCall, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return convolution(n, x, w, b)


@op("ConvTranspose")
def _conv_transpose(n: OperatorCall, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    rank = x.dim() - 2
    kernel, extent = list(w.shape[2:]), list(x.shape[2:])
    stride = n.attr("strides") or [1] * rank
    dilation = n.attr("dilations") or [1] * rank
    extra = n.attr("output_padding") or [0] * rank
    whole = [
        (d - 1) * s + r * (k - 1) + 1 + e
        for d, s, r, k, e in zip(extent, stride, dilation, kernel, extra, strict=True)
    ]
    auto, shape = n.attr("auto_pad", "NOTSET"), n.attr("output_shape")
    if shape or auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = shape[-rank:] if shape else [d * s for d, s in zip(extent, stride, strict=True)]
        total = [a - b for a, b in zip(whole, wanted, strict=True)]
        more = [t - t // 2 for t in total]
        less = [t // 2 for t in total]
        low, high = (less, more) if auto == "SAME_UPPER" else (more, less)
    else:
        pads = n.attr("pads") or [0] * (2 * rank)
        low, high = list(pads[:rank]), list(pads[rank:])
    # Everything, then what padding takes away: it may differ on the two sides, and be negative.
    result = _BACK[rank - 1](x, w, None, stride, [0] * rank, 0, n.attr("group", 1), dilation)
    grow = [p for e in extra[::-1] for p in (0, e)]
    result = F.pad(result, grow) if any(grow) else result
    cut = [p for pair in zip(low[::-1], high[::-1], strict=True) for p in pair]
    result = F.pad(result, [-p for p in cut]) if any(cut) else result
    return result if b is None else result + b.reshape(1, -1, *([1] * rank))


def _wide(x: Tensor, zero: Tensor | None, axis: int | None = None) -> Tensor:
    """Integers less their zero point, as 64-bit integers."""
    value = x.to(torch.int64)
    if zero is None:
        return value
    offset = zero.to(torch.int64)
    if offset.dim() == 1 and offset.numel() > 1 and axis is not None:
        shape = [1] * x.dim()
        shape[axis] = -1
        offset = offset.reshape(shape)
    elif offset.numel() == 1:
        offset = offset.reshape(())
    return value - offset


@op("MatMulInteger")
def _matmul_integer(
    n: OperatorCall, a: Tensor, b: Tensor, za: Tensor | None = None, zb: Tensor | None = None
) -> Tensor:
    left, right = _wide(a, za, a.dim() - 2), _wide(b, zb, b.dim() - 1)
    return torch.matmul(left, right).to(torch.int32)


@op("ConvInteger")
def _conv_integer(
    n: OperatorCall, x: Tensor, w: Tensor, zx: Tensor | None = None, zw: Tensor | None = None
) -> Tensor:
    # Exact in double precision: products of bytes, far fewer than 2**37 of them.
    left, right = _wide(x, zx).double(), _wide(w, zw, 0).double()
    return convolution(n, left, right).round().to(torch.int32)


def _quantised(value: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    limits = torch.iinfo(zero.dtype)
    whole = torch.round(value / scale) + zero.to(value.dtype)
    return torch.clamp(whole, limits.min, limits.max).to(torch.int64).to(zero.dtype)


@op("QLinearMatMul")
def _qlinear_matmul(n: OperatorCall, *args: Tensor) -> Tensor:
    a, sa, za, b, sb, zb, sy, zy = args
    product = torch.matmul(_wide(a, za, a.dim() - 2), _wide(b, zb, b.dim() - 1)).double()
    scale = (sa.double() * sb.double()) / sy.double()
    return _quantised(product * scale, torch.ones((), dtype=torch.float64), zy)


@op("QLinearConv")
def _qlinear_conv(n: OperatorCall, *args: Tensor) -> Tensor:
    x, sx, zx, w, sw, zw, sy, zy = args[:8]
    product = convolution(n, _wide(x, zx).double(), _wide(w, zw, 0).double())
    shape = [1, -1] + [1] * (x.dim() - 2)
    if len(args) > 8 and args[8] is not None:
        product = product + args[8].double().reshape(shape)
    scale = (sx.double() * sw.double().reshape(-1)) / sy.double()
    return _quantised(product * scale.reshape(shape), torch.ones((), dtype=torch.float64), zy)


def _along(parameter: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """Scales or zero points as they broadcast with ``x``: of everything, an axis, or blocks."""
    if parameter.numel() == 1 and parameter.dim() <= 1:
        return parameter.reshape(())
    if block:
        return parameter.repeat_interleave(block, dim=axis).narrow(axis, 0, x.shape[axis])
    shape = [1] * x.dim()
    shape[axis] = -1
    return parameter.reshape(shape)


@op("QuantizeLinear")
def _quantize(n: OperatorCall, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    from torch_pruner.onnx.operators.types import torch_dtype

    axis = in_range(n.attr("axis", 1), x.dim()) if x.dim() else 0
    block = n.attr("block_size", 0)
    number = n.attr("output_dtype", 0)
    kind = zero.dtype if zero is not None else torch_dtype(number) if number else torch.uint8
    value = x.float() / _along(scale, x, axis, block).float()
    if kind.is_floating_point:
        return value.clamp(-torch.finfo(kind).max, torch.finfo(kind).max).to(kind)
    whole = torch.round(value)
    if zero is not None:
        whole = whole + _along(zero, x, axis, block).float()
    limits = torch.iinfo(kind)
    return whole.clamp(limits.min, limits.max).to(torch.int64).to(kind)


@op("DequantizeLinear")
def _dequantize(n: OperatorCall, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    axis = in_range(n.attr("axis", 1), x.dim()) if x.dim() else 0
    block = n.attr("block_size", 0)
    value = x.float()
    if zero is not None:
        value = value - _along(zero, x, axis, block).float()
    return (value * _along(scale, x, axis, block).float()).to(scale.dtype)


@op("DynamicQuantizeLinear")
def _dynamic_quantize(n: OperatorCall, x: Tensor) -> Result:
    low = torch.clamp(x.min(), max=0.0)
    high = torch.clamp(x.max(), min=0.0)
    scale = (high - low) / 255.0
    zero = torch.clamp(torch.round(-low / scale), 0.0, 255.0)
    whole = torch.clamp(torch.round(x / scale) + zero, 0.0, 255.0)
    return whole.to(torch.uint8), scale, zero.to(torch.uint8)


@op("AffineGrid")
def _affine_grid(n: OperatorCall, theta: Tensor, _: Tensor) -> Tensor:
    return F.affine_grid(theta, n.ints(1) or [], align_corners=bool(n.attr("align_corners", 0)))


def product_of(shape: list[int]) -> int:
    """How many elements."""
    return math.prod(shape)
