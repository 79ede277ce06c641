"""Matrix products and convolutions, with the gradients of convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments
from torch_pruner.dynamo.lower.aten.value import Number, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

aten = torch.ops.aten


def _accumulator(x: Value) -> str:
    return x.widened().dtype


def _combined(bias: Value, product: Value, beta: Number, alpha: Number) -> Value:
    """``beta * bias + alpha * product`` in the accumulator's dtype; ``beta == 0`` ignores bias."""
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        return scaled
    wide = bias.cast(product.dtype)
    return scaled + (wide if beta == 1 else wide * beta)


@rule(aten.mm.default, aten.bmm.default)
def mm(_call: OpCall, a: Value, b: Value) -> Value:
    return a.matmul(b)


@rule(aten.addmm.default, aten.baddbmm.default)
def addmm(
    _call: OpCall, bias: Value, a: Value, b: Value, beta: Number = 1, alpha: Number = 1
) -> Value:
    return _combined(bias, a.matmul(b, _accumulator(a)), beta, alpha)


@rule(aten.addmv.default)
def addmv(
    _call: OpCall, bias: Value, a: Value, v: Value, beta: Number = 1, alpha: Number = 1
) -> Value:
    product = a.matmul(v.unsqueeze(1), _accumulator(a)).reshape((a.shape[0],))
    return _combined(bias, product, beta, alpha)


@rule(aten.mv.default)
def mv(_call: OpCall, a: Value, v: Value) -> Value:
    return a.matmul(v.unsqueeze(1)).reshape((a.shape[0],))


@rule(aten.dot.default)
def dot(_call: OpCall, a: Value, b: Value) -> Value:
    return a.unsqueeze(0).matmul(b.unsqueeze(1)).reshape(())


@rule(aten.linear.default)
def linear(call: OpCall, x: Value, weight: Value, bias: Value | None = None) -> Value:
    rows = 1
    for extent in x.shape[:-1]:
        rows *= extent
    product = x.reshape((rows, x.shape[-1])).matmul(weight.swapped(), _accumulator(x))
    out = product if bias is None else product + bias.cast(product.dtype)
    return out.reshape(call.shape)


def _spread(values: Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(values) * rank if len(values) == 1 else tuple(values)


def _live_offsets(
    size: int, out: int, kernel: int, stride: int, lo: int, hi: int, dilation: int
) -> tuple[int, int]:
    """(first, count) of the kernel offsets that touch the input, one dimension."""
    live = [
        r
        for r in range(kernel)
        if any(0 <= o * stride + r * dilation - lo < size for o in range(out))
    ]
    if not live:
        return 0, kernel
    first, count = live[0], live[-1] - live[0] + 1
    fits = first * dilation <= lo and (kernel - first - count) * dilation <= hi
    return (first, count) if fits else (0, kernel)


def conv(
    x: Value,
    weight: Value,
    shape: Sequence[int],
    *,
    stride: Sequence[int],
    lo: Sequence[int],
    hi: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    dtype: str | None = None,
) -> Value:
    """The IR's convolution with the given output shape.

    Kernel offsets that lie outside the input for every output position are left out.
    """
    cuts = [
        _live_offsets(*row)
        for row in zip(
            x.shape[2:], shape[2:], weight.shape[2:], stride, lo, hi, dilation, strict=True
        )
    ]
    if any(count < k for (_, count), k in zip(cuts, weight.shape[2:], strict=True)):
        rows = list(zip(cuts, weight.shape[2:], dilation, lo, hi, strict=True))
        lo = [p - first * d for (first, _), _, d, p, _ in rows]
        hi = [p - (k - first - count) * d for (first, count), k, d, _, p in rows]
        starts = (0, 0, *(first for first, _ in cuts))
        weight = weight.slice(starts, (*weight.shape[:2], *(count for _, count in cuts)))
    ids = x.builder.append(
        "conv", (x.id, weight.id), shape, dtype or x.dtype, stride=tuple(stride), lo=tuple(lo),
        hi=tuple(hi), dilation=tuple(dilation), groups=groups,
    )  # fmt: skip
    return Value(x.builder, ids)


def conv_transpose(
    x: Value,
    weight: Value,
    shape: Sequence[int],
    *,
    stride: Sequence[int],
    lo: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    dtype: str | None = None,
) -> Value:
    """The IR's transposed convolution with the given output shape.

    With one tap it is a convolution with the weight's first axes exchanged, which reads its input
    where it lies (the gradient of a 1x1 convolution's input), and zeros between the results. Else
    sizes are rounded up to multiples of the stride, for the products of each phase
    (``graph.contraction``).
    """
    rank = weight.ndim - 2
    wide = [n * s for n, s in zip(x.shape[2:], stride, strict=True)]
    fits = all(n <= w for n, w in zip(shape[2:], wide, strict=True))
    if all(n == 1 for n in weight.shape[2:]) and groups == 1 and not any(lo) and fits:
        ones, turned = [1] * rank, weight.permute((1, 0, *range(2, 2 + rank)))
        small = conv(
            x, turned, (*shape[:2], *x.shape[2:]), stride=ones, lo=lo, hi=lo, dilation=ones,
            groups=1, dtype=dtype,
        )  # fmt: skip
        return _spread_apart(small, stride).slice([0] * len(shape), shape)
    even = [-(-n // s) * s for n, s in zip(shape[2:], stride, strict=True)]
    if groups == 1 and max(dilation) == 1 and even != list(shape[2:]):
        whole = conv_transpose(
            x, weight, (*shape[:2], *even), stride=stride, lo=lo, dilation=dilation, groups=1,
            dtype=dtype,
        )  # fmt: skip
        return whole.slice([0] * len(shape), shape)
    ids = x.builder.append(
        "conv_transpose", (x.id, weight.id), shape, dtype or x.dtype, stride=tuple(stride),
        lo=tuple(lo), dilation=tuple(dilation), groups=groups,
    )  # fmt: skip
    return Value(x.builder, ids)


def _spread_apart(x: Value, stride: Sequence[int]) -> Value:
    """The positions of ``x`` at multiples of ``stride``, and zeros between them."""
    lead, size = x.shape[:2], x.shape[2:]
    if max(stride) == 1:
        return x
    apart = x.reshape((*lead, *(n for extent in size for n in (extent, 1))))
    hi = (0, 0, *(n for s in stride for n in (0, s - 1)))
    wide = apart.pad([0] * len(hi), hi)
    return wide.reshape((*lead, *(n * s for n, s in zip(size, stride, strict=True))))


@rule(aten.convolution.default)
def convolution(
    call: OpCall,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    del output_padding
    rank = weight.ndim - 2
    if x.ndim != weight.ndim:
        raise arguments("convolution of an input without a batch dim")
    strides, pads, dilations = (_spread(v, rank) for v in (stride, padding, dilation))
    dtype = _accumulator(x) if bias is not None else x.dtype
    single = all(n == 1 for n in x.shape[2:]) and tuple(call.shape[2:]) == tuple(weight.shape[2:])
    if transposed and single and groups == 1 and not any(pads) and max(dilations) == 1:
        out = _spread_pixel(x, weight, dtype)
    elif transposed:
        out = conv_transpose(
            x,
            weight,
            call.shape,
            stride=strides,
            lo=pads,
            dilation=dilations,
            groups=groups,
            dtype=dtype,
        )
    else:
        out = conv(
            x, weight, call.shape, stride=strides, lo=pads, hi=pads, dilation=dilations,
            groups=groups, dtype=dtype,
        )  # fmt: skip
    if bias is None:
        return out
    return out + bias.cast(dtype).reshape((bias.shape[0], *[1] * rank))


def _spread_pixel(x: Value, weight: Value, dtype: str) -> Value:
    """A transposed convolution of one pixel: every output position has a tap to itself."""
    images, channels, columns, kernel = x.shape[0], *weight.shape[:2], weight.shape[2:]
    rank, taps = len(kernel), 1
    for k in kernel:
        taps *= k
    spread = weight.permute((0, *range(2, 2 + rank), 1)).reshape((channels, taps * columns))
    product = x.reshape((images, channels)).matmul(spread, dtype)
    return product.reshape((images, *kernel, columns)).permute((0, rank + 1, *range(1, rank + 1)))


def _weight_gradient(
    x: Value,
    grad: Value,
    kernel: Sequence[int],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Value:
    """The gradient of a convolution's weight: a convolution with batch and channels exchanged."""
    rank, batch, channels = len(kernel), x.shape[0], x.shape[1]
    depth = channels // groups
    reach = [
        d * (k - 1) + s * (n - 1) + 1
        for d, k, s, n in zip(dilation, kernel, stride, grad.shape[2:], strict=True)
    ]
    hi = [r - n - p for r, n, p in zip(reach, x.shape[2:], padding, strict=True)]
    if any(h < 0 for h in hi):
        cut = [n + min(h, 0) for n, h in zip(x.shape[2:], hi, strict=True)]
        x = x.slice([0] * x.ndim, (batch, channels, *cut))
    space = x.shape[2:]
    grouped = x.reshape((batch, groups, depth, *space))
    order = (2, 1, 0, *range(3, 3 + rank))
    source = grouped.permute(order).reshape((depth, groups * batch, *space))
    taps = grad.permute((1, 0, *range(2, 2 + rank)))
    out = conv(
        source, taps, (depth, grad.shape[1], *kernel), stride=dilation, lo=padding,
        hi=[max(h, 0) for h in hi], dilation=stride, groups=groups, dtype=_accumulator(x),
    )  # fmt: skip
    return out.permute((1, 0, *range(2, 2 + rank)))


@rule(aten.convolution_backward.default)
def convolution_backward(
    _call: OpCall,
    grad: Value,
    x: Value,
    weight: Value,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    del bias_sizes, output_padding
    rank = weight.ndim - 2
    if x.ndim != weight.ndim:
        raise arguments("convolution of an input without a batch dim")
    strides, pads, dilations = (_spread(v, rank) for v in (stride, padding, dilation))
    kernel = weight.shape[2:]
    into_x: Value | None = None
    into_weight: Value | None = None
    if output_mask[0] and transposed:
        into_x = conv(
            grad,
            weight,
            x.shape,
            stride=strides,
            lo=pads,
            hi=pads,
            dilation=dilations,
            groups=groups,
        )
    elif output_mask[0]:
        into_x = conv_transpose(
            grad, weight, x.shape, stride=strides, lo=pads, dilation=dilations, groups=groups
        )
    if output_mask[1]:
        source, taps = (grad, x) if transposed else (x, grad)
        into_weight = _weight_gradient(
            source, taps, kernel, stride=strides, padding=pads, dilation=dilations, groups=groups
        )
    axes = (0, *range(2, 2 + rank))
    return into_x, into_weight, grad.widened().sum(axes) if output_mask[2] else None
