"""Batch, layer, group and root-mean-square normalisation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.reductions import moments
from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.dynamo.lower.aten.value import Value

aten = torch.ops.aten


def _affine(x: Value, weight: Value | None, bias: Value | None) -> Value:
    if weight is not None:
        x = x * weight.cast(x.dtype)
    return x if bias is None else x + bias.cast(x.dtype)


def _per_channel(vector: Value, rank: int) -> Value:
    return vector.reshape((vector.shape[0], *[1] * (rank - 2)))


@rule(aten.native_layer_norm.default)
def layer_norm(
    _call: OpCall,
    x: Value,
    normalized_shape: Sequence[int],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> tuple[Value, Value, Value]:
    wide = x.widened()
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    variance, mean = moments(wide, axes)
    scale = (variance + eps).apply("rsqrt")
    return _affine((wide - mean) * scale, weight, bias), mean, scale


@rule(aten._fused_rms_norm.default)
def rms_norm(
    _call: OpCall,
    x: Value,
    normalized_shape: Sequence[int],
    weight: Value | None,
    eps: float | None,
) -> tuple[Value, Value]:
    assert x.fake is not None
    wide = x.widened()
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    tiny = torch.finfo(x.fake.dtype).eps if eps is None else eps
    scale = ((wide * wide).mean(axes, keepdim=True) + tiny).apply("rsqrt")
    return _affine(wide * scale, weight, None), scale


@rule(aten.native_group_norm.default)
def group_norm(
    _call: OpCall,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    batch: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
) -> tuple[Value, Value, Value]:
    """Moments of channels first, and those of groups of these.

    Channels are rows in either order of memory, and as many as threads may want.
    """
    shape = x.shape if x.ndim > 2 else (batch, channels, inner)
    wide, vector = x.widened().reshape(shape), (channels, *[1] * (len(shape) - 2))
    grouped = (batch, groups, channels // groups)
    variances, means = (v.reshape(grouped) for v in moments(wide, range(2, len(shape))))
    mean = means.mean((2,), keepdim=True)
    apart = means - mean
    variance = (variances + apart * apart).mean((2,), keepdim=True)
    scale = (variance + eps).apply("rsqrt")
    middle, factor = (v.broadcast(grouped).reshape((batch, *vector)) for v in (mean, scale))
    if weight is not None:
        factor = factor * weight.reshape(vector).cast(wide.dtype)
    shift = None if bias is None else bias.reshape(vector)
    made = _affine((wide - middle) * factor, None, shift).reshape(x.shape)
    return made, mean.reshape((batch, groups)), scale.reshape((batch, groups))


def _folded(
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    eps: float,
) -> Value:
    """``x * s + t`` with ``s`` and ``t`` computed on vectors, which fold when they are static."""
    wide = x.widened()
    scale = (variance.cast(wide.dtype) + eps).apply("rsqrt")
    if weight is not None:
        scale = weight.cast(wide.dtype) * scale
    shift = -(mean.cast(wide.dtype) * scale)
    if bias is not None:
        shift = bias.cast(wide.dtype) + shift
    return wide * _per_channel(scale, x.ndim) + _per_channel(shift, x.ndim)


@rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    call: OpCall,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    del momentum
    if call.used & {1, 2}:
        raise arguments("the empty statistics of an inference batch norm")
    return _folded(x, weight, bias, mean, variance, eps), None, None


@rule(aten.native_batch_norm.default, aten.cudnn_batch_norm.default)
def batch_norm(
    call: OpCall,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    if training or mean is None or variance is None:
        raise arguments("batch norm that updates its statistics in place")
    return batch_norm_inference(call, x, weight, bias, mean, variance, momentum, eps)


@rule(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_stats(
    _call: OpCall,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    del training, momentum
    variance, mean = batch_moments(x)
    scale = (variance + eps).apply("rsqrt")
    return _folded(x, weight, bias, mean, variance, eps), mean, scale


def batch_moments(x: Value) -> tuple[Value, Value]:
    """Variance (biased) and mean of each channel, as vectors."""
    axes = (0, *range(2, x.ndim))
    variance, mean = moments(x.widened(), axes)
    return variance.reshape((x.shape[1],)), mean.reshape((x.shape[1],))


@rule(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    call: OpCall,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    if not training:
        out = _folded(x, weight, bias, running_mean, running_var, eps)
        if call.used & {1, 2}:
            raise arguments("the empty statistics of an inference batch norm")
        return out, None, None, running_mean, running_var
    variance, mean = batch_moments(x)
    scale = (variance + eps).apply("rsqrt")
    count = math.prod(x.shape) // x.shape[1]
    unbiased = variance * (count / (count - 1)) if count > 1 else variance
    keep = 1.0 - momentum
    new_mean = mean * momentum + running_mean.cast(mean.dtype) * keep
    new_var = unbiased * momentum + running_var.cast(mean.dtype) * keep
    return _folded(x, weight, bias, mean, variance, eps), mean, scale, new_mean, new_var
