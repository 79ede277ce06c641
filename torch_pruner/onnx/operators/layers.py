"""Layers: normalisation, pooling, losses."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F

from torch_pruner.onnx.operators.linear import window
from torch_pruner.onnx.operators.registry import OperatorCall, Result, Tensor, in_range, op


def _channels(p: Tensor, rank: int) -> Tensor:
    return p.reshape(1, -1, *([1] * (rank - 2)))


@op("BatchNormalization")
def _batch_norm(
    n: OperatorCall, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor
) -> Result:
    eps, momentum = n.attr("epsilon", 1e-5), n.attr("momentum", 0.9)
    if not n.attr("training_mode", 0):
        return F.batch_norm(x, mean, var, scale, bias, False, 0.0, eps)
    axes = [0, *range(2, x.dim())]
    now, spread = x.mean(dim=axes), x.var(dim=axes, unbiased=False)
    normal = (x - _channels(now, x.dim())) * torch.rsqrt(_channels(spread, x.dim()) + eps)
    result = normal * _channels(scale, x.dim()) + _channels(bias, x.dim())
    return (
        result,
        mean * momentum + now * (1 - momentum),
        var * momentum + spread * (1 - momentum),
    )


@op("InstanceNormalization")
def _instance_norm(n: OperatorCall, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=n.attr("epsilon", 1e-5))


@op("LayerNormalization")
def _layer_norm(n: OperatorCall, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Result:
    axis = in_range(n.attr("axis", -1), x.dim())
    eps = n.attr("epsilon", 1e-5)
    shape = list(x.shape[axis:])
    if n.n_outputs == 1 and list(scale.shape) == shape:
        return F.layer_norm(x, shape, scale, bias, eps)
    axes = list(range(axis, x.dim()))
    value = x.float()
    mean = value.mean(dim=axes, keepdim=True)
    inverse = torch.rsqrt((value - mean).square().mean(dim=axes, keepdim=True) + eps)
    result = ((value - mean) * inverse).to(x.dtype) * scale
    return (result if bias is None else result + bias), mean, inverse


@op("RMSNormalization")
def _rms_norm(n: OperatorCall, x: Tensor, scale: Tensor) -> Tensor:
    axes = list(range(in_range(n.attr("axis", -1), x.dim()), x.dim()))
    value = x.float()
    inverse = torch.rsqrt(value.square().mean(dim=axes, keepdim=True) + n.attr("epsilon", 1e-5))
    return (value * inverse).to(x.dtype) * scale


@op("GroupNormalization")
def _group_norm(n: OperatorCall, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups, eps = n.attr("num_groups"), n.attr("epsilon", 1e-5)
    if scale.shape[0] == x.shape[1]:
        return F.group_norm(x, groups, scale, bias, eps)
    normal = F.group_norm(x, groups, eps=eps)  # opset 18: scales of groups
    each = x.shape[1] // groups
    weights = (p.repeat_interleave(each) for p in (scale, bias))
    factor, offset = (_channels(p, x.dim()) for p in weights)
    return normal * factor + offset


@op("MeanVarianceNormalization")
def _mean_variance(n: OperatorCall, x: Tensor) -> Tensor:
    axes = n.attr("axes") or [0, 2, 3]
    mean = x.mean(dim=axes, keepdim=True)
    spread = (x * x).mean(dim=axes, keepdim=True) - mean * mean
    return (x - mean) / (spread.sqrt() + 1e-9)


@op("LRN")
def _lrn(n: OperatorCall, x: Tensor) -> Tensor:
    size = n.attr("size")
    alpha, beta, bias = n.attr("alpha", 1e-4), n.attr("beta", 0.75), n.attr("bias", 1.0)
    n.spend(size)
    low = (size - 1) // 2
    square = F.pad((x * x).unsqueeze(1), [0, 0] * (x.dim() - 2) + [low, size - 1 - low])[:, 0]
    total = sum(square.narrow(1, k, x.shape[1]) for k in range(size))
    return x / (bias + alpha / size * total) ** beta


@op("LpNormalization")
def _lp_norm(n: OperatorCall, x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, n.attr("p", 2), dim=n.attr("axis", -1), keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(x), x / torch.where(norm == 0, 1.0, norm))


def _pool_geometry(n: OperatorCall, x: Tensor) -> tuple[list[int], ...]:
    """(kernel, stride, dilation, low, high) with ``high`` grown as ``ceil_mode`` asks."""
    kernel, extent = n.attr("kernel_shape"), list(x.shape[2:])
    stride, dilation, low, high = window(n, len(kernel), kernel, extent)
    if n.attr("ceil_mode", 0):
        for k in range(len(kernel)):
            reach = dilation[k] * (kernel[k] - 1) + 1
            span = extent[k] + low[k] + high[k] - reach
            out = -(-span // stride[k]) + 1
            if (out - 1) * stride[k] >= extent[k] + low[k]:
                out -= 1  # a window may not begin in the padding behind
            high[k] = (out - 1) * stride[k] + reach - extent[k] - low[k]
    return kernel, stride, dilation, low, high


def _windows(
    n: OperatorCall, x: Tensor, geometry: tuple[list[int], ...], fill: float
) -> list[Tensor]:
    """``x`` as seen by each position of the window, all of the shape of the result."""
    kernel, stride, dilation, low, high = geometry
    n.spend(len(kernel) * math.prod(kernel))
    grown = F.pad(x, _pads(low, high), value=fill)
    sizes = [
        (g - d * (k - 1) - 1) // s + 1
        for g, d, k, s in zip(grown.shape[2:], dilation, kernel, stride, strict=True)
    ]
    seen = []
    for place in itertools.product(*(range(k) for k in kernel)):
        part = grown
        for a, (p, d, s, size) in enumerate(zip(place, dilation, stride, sizes, strict=True)):
            part = part.narrow(2 + a, p * d, (size - 1) * s + 1)
            part = part[(slice(None),) * (2 + a) + (slice(None, None, s),)]
        seen.append(part)
    return seen


def _pads(low: list[int], high: list[int]) -> list[int]:
    """Padding as ``F.pad`` takes it."""
    return [p for pair in zip(low[::-1], high[::-1], strict=True) for p in pair]


def _many(kernel: list[int]) -> bool:
    """Whether a window has so many positions that each is no longer an operator of its own."""
    return math.prod(kernel) > _FEW_POSITIONS and len(kernel) <= 3


_FEW_POSITIONS = 16


def _sums(n: OperatorCall, x: Tensor, geometry: tuple[list[int], ...]) -> Tensor:
    """Sums over windows, of zeros outside."""
    kernel, stride, dilation, low, high = geometry
    if not _many(kernel) or any(d != 1 for d in dilation):
        return torch.stack(_windows(n, x, geometry, 0.0)).sum(0)
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
    return pool(F.pad(x, _pads(low, high)), kernel, stride) * math.prod(kernel)


@op("MaxPool")
def _max_pool(n: OperatorCall, x: Tensor) -> Result:
    geometry = _pool_geometry(n, x)
    kernel, stride, dilation, low, high = geometry
    rank = len(kernel)
    narrow = all(p <= k // 2 for p, k in zip(low, kernel, strict=True)) and low == high
    if narrow and n.n_outputs == 1 and x.is_floating_point():
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
        return pool(x, kernel, stride, low, dilation)
    least = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    if _many(kernel) and n.n_outputs == 1 and x.is_floating_point():
        grown = F.pad(x, _pads(low, high), value=least)
        return (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1](
            grown, kernel, stride, 0, dilation
        )
    stacked = torch.stack(_windows(n, x, geometry, least))
    best = stacked.amax(dim=0)
    if n.n_outputs == 1:
        return best
    extent = list(x.shape[2:])
    place = torch.arange(math.prod(extent))
    if n.attr("storage_order", 0):
        place = place.reshape(extent[::-1]).permute(*range(rank)[::-1])
    where = place.reshape(1, 1, *extent).expand(x.shape)
    places = torch.stack(_windows(n, where, geometry, 0))
    first = (stacked == best).to(torch.uint8).argmax(dim=0, keepdim=True)
    offset = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[0], x.shape[1], *([1] * rank))
    return best, torch.gather(places, 0, first)[0] + offset * math.prod(extent)


@op("AveragePool", "LpPool")
def _average_pool(n: OperatorCall, x: Tensor) -> Tensor:
    geometry = _pool_geometry(n, x)
    kernel, stride, dilation, low, high = geometry
    if n.op == "LpPool":
        p = n.attr("p", 2)
        total = torch.stack([part.abs() ** p for part in _windows(n, x, geometry, 0.0)]).sum(0)
        return total ** (1.0 / p)
    total = _sums(n, x, geometry)
    inside = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype)
    if n.attr("count_include_pad", 0):
        # What the model pads counts; what ceil_mode adds behind it does not.
        pads = n.attr("pads") or [0] * (2 * len(kernel))
        after = list(pads[len(kernel) :]) if n.attr("auto_pad", "NOTSET") == "NOTSET" else high
        inside = F.pad(inside, _pads(low, after), value=1.0)
        left = [h - a for h, a in zip(high, after, strict=True)]
        geometry = kernel, stride, dilation, [0] * len(kernel), left
    return total / _sums(n, inside, geometry)


@op("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(n: OperatorCall, x: Tensor) -> Tensor:
    axes = list(range(2, x.dim()))
    if n.op == "GlobalAveragePool":
        return x.mean(dim=axes, keepdim=True)
    if n.op == "GlobalMaxPool":
        return x.amax(dim=axes, keepdim=True)
    p = n.attr("p", 2)
    return (x.abs() ** p).sum(dim=axes, keepdim=True) ** (1.0 / p)


@op("MaxUnpool")
def _max_unpool(n: OperatorCall, x: Tensor, index: Tensor, _: Tensor | None = None) -> Tensor:
    kernel = n.attr("kernel_shape")
    rank = len(kernel)
    stride, pads = n.attr("strides") or [1] * rank, n.attr("pads") or [0] * (2 * rank)
    shape = [
        (d - 1) * s + k - pads[a] - pads[a + rank]
        for a, (d, s, k) in enumerate(zip(x.shape[2:], stride, kernel, strict=True))
    ]
    wanted = n.ints(2)
    whole = [x.shape[0], x.shape[1], *shape]
    flat = torch.zeros(math.prod(whole), dtype=x.dtype)
    made = flat.scatter(0, index.reshape(-1), x.reshape(-1)).reshape(whole)
    if wanted is None or wanted == whole:
        return made
    # Positions count in the smaller shape; the rest of the larger one stays zero.
    grow = [p for a in range(rank)[::-1] for p in (0, wanted[2 + a] - shape[a])]
    return F.pad(made, grow)


@op("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def _nll(n: OperatorCall, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Result:
    scores = torch.log_softmax(x, dim=1) if n.op == "SoftmaxCrossEntropyLoss" else x
    ignored = n.attr("ignore_index")
    labels = target.to(torch.int64)
    kept = torch.ones_like(labels, dtype=torch.bool) if ignored is None else labels != ignored
    safe = torch.where(kept, labels, torch.zeros_like(labels))
    picked = -torch.gather(scores, 1, safe.unsqueeze(1)).squeeze(1)
    each = torch.ones_like(picked) if weight is None else weight[safe]
    each = torch.where(kept, each, torch.zeros_like(each))
    loss = picked * each
    how = n.attr("reduction", "mean")
    if how == "mean":
        loss = loss.sum() / each.sum()
    elif how == "sum":
        loss = loss.sum()
    return (loss, scores) if n.n_outputs > 1 else loss
