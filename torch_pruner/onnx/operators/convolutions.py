"""Convolutions that torch has no operator of: with a state, and of positions that are computed."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F

from torch_pruner.onnx.operators.linear import window
from torch_pruner.onnx.operators.registry import OperatorCall, Result, Tensor, op


@op("CausalConvWithState")
def _causal(
    n: OperatorCall,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past: Tensor | None = None,
) -> Result:
    """Convolve each channel of ``x`` (batch, channels, length), after the ``k - 1`` values of
    ``past``.
    """
    kept = weight.shape[-1] - 1
    before = x.new_zeros(*x.shape[:-1], kept) if past is None else past
    joined = torch.cat([before, x], dim=-1)
    result = F.conv1d(joined, weight, bias, groups=x.shape[1])
    if n.attr("activation", "none") in ("silu", "swish"):
        result = F.silu(result)
    return result, joined.narrow(-1, joined.shape[-1] - kept, kept)


@op("DeformConv")
def _deformable(
    n: OperatorCall,
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Each tap reads ``offset`` away from its place (batch, offset groups, taps, axes, *out),
    between elements by linear interpolation, zeros outside.
    """
    images, channels, *extent = x.shape
    kernel, out, groups = weight.shape[2:], offset.shape[2:], n.attr("group", 1)
    sharing, taps = n.attr("offset_group", 1), math.prod(kernel)
    n.spend(taps * len(extent))
    moved = offset.reshape(images, sharing, taps, len(extent), *out)
    places = _places(n, extent, list(kernel), list(out)).to(offset) + moved
    read = _between(x.reshape(images, sharing, channels // sharing, *extent), places)
    if mask is not None:
        read = read * mask.reshape(images, sharing, 1, taps, -1)
    columns = read.reshape(images, groups, channels // groups * taps, -1)
    rows = weight.reshape(groups, weight.shape[0] // groups, -1)
    result = torch.matmul(rows, columns).reshape(images, weight.shape[0], *out)
    return result if bias is None else result + bias.reshape(-1, *[1] * len(out))


def _places(n: OperatorCall, extent: list[int], kernel: list[int], out: list[int]) -> Tensor:
    """Where taps read without an offset: (taps, axes, *out)."""
    stride, dilation, low, _ = window(n, len(extent), kernel, extent)
    found = []
    for tap in itertools.product(*map(range, kernel)):
        at = [
            torch.arange(count) * s + k * d - before
            for count, s, k, d, before in zip(out, stride, tap, dilation, low, strict=True)
        ]
        found.append(torch.stack(torch.meshgrid(*at, indexing="ij")))
    return torch.stack(found)


def _between(x: Tensor, places: Tensor) -> Tensor:
    """``x`` (batch, groups, channels, *extent) at ``places`` (batch, groups, taps, axes, *out):
    (batch, groups, channels, taps, positions).
    """
    extent = x.shape[3:]
    flat, at = x.flatten(3), places.flatten(4)  # (..., positions)
    first = at.floor()
    total: Tensor | None = None
    for corner in itertools.product((0, 1), repeat=len(extent)):
        index = torch.zeros_like(at[:, :, :, 0], dtype=torch.int64)
        share = torch.ones_like(at[:, :, :, 0])
        for axis, (size, step) in enumerate(zip(extent, corner, strict=True)):
            place, begin = at[:, :, :, axis], first[:, :, :, axis]
            near = begin.to(torch.int64) + step
            inside = (near >= 0) & (near < size)
            share = share * (1 - (place - begin - step).abs()) * inside
            index = index * size + near.clamp(0, size - 1)
        picked = index.flatten(2).unsqueeze(2).expand(-1, -1, x.shape[2], -1)
        read = flat.gather(3, picked).unflatten(3, index.shape[2:]) * share.unsqueeze(2)
        total = read if total is None else total + read
    assert total is not None
    return total
