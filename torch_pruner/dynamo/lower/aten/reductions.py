"""Sums, extremes, moments and norms over dims."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments
from torch_pruner.dynamo.lower.aten.value import Number, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

aten = torch.ops.aten

_CUMSUM_LIMIT = 1 << 21


def axes_of(x: Value, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """Dims as sorted non-negative positions; None and () mean all of them."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(sorted(d % x.ndim for d in dims)) if x.ndim else ()


def _wide(call: OpCall, x: Value, dtype: torch.dtype | None = None) -> Value:
    """``x`` in the dtype in which to accumulate the result."""
    del dtype
    return x.cast("float32" if call.dtype in ("bfloat16", "float16") else call.dtype)


@rule(aten.sum.default)
def sum_all(call: OpCall, x: Value, dtype: torch.dtype | None = None) -> Value:
    return _wide(call, x, dtype).sum(range(x.ndim))


@rule(aten.sum.dim_IntList)
def sum_dims(
    call: OpCall,
    x: Value,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:
    return _wide(call, x, dtype).sum(axes_of(x, dim), keepdim=keepdim)


@rule(aten.mean.default)
def mean_all(call: OpCall, x: Value, dtype: torch.dtype | None = None) -> Value:
    return mean_dims(call, x, None, False, dtype)


@rule(aten.mean.dim)
def mean_dims(
    call: OpCall,
    x: Value,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:
    return _wide(call, x, dtype).mean(axes_of(x, dim), keepdim=keepdim)


@rule(aten.prod.default)
def prod_all(call: OpCall, x: Value, dtype: torch.dtype | None = None) -> Value:
    return _wide(call, x, dtype).reduce("prod", range(x.ndim))


@rule(aten.prod.dim_int)
def prod_dim(
    call: OpCall, x: Value, dim: int, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    return _wide(call, x, dtype).reduce("prod", axes_of(x, dim), keepdim=keepdim)


@rule(aten.amax.default)
def amax(_call: OpCall, x: Value, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    return x.reduce("max", axes_of(x, dim), keepdim=keepdim)


@rule(aten.amin.default)
def amin(_call: OpCall, x: Value, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    return x.reduce("min", axes_of(x, dim), keepdim=keepdim)


@rule(aten.max.default)
def max_all(call: OpCall, x: Value) -> Value:
    return amax(call, x)


@rule(aten.min.default)
def min_all(call: OpCall, x: Value) -> Value:
    return amin(call, x)


def _position(x: Value, op: str, dim: int | None, keepdim: bool) -> Value:
    if x.dtype == "bool":
        x = x.cast("uint8")
    if x.ndim == 0:
        return Value(x.builder, x.builder.const(0, "int64"))
    if dim is None:
        shape = (1,) * x.ndim if keepdim else ()
        count = x.builder.nodes[x.id].numel
        return x.reshape((count,)).reduce(op, (0,), dtype="int64").reshape(shape)
    return x.reduce(op, (dim % x.ndim,), keepdim=keepdim, dtype="int64")


@rule(aten.argmax.default)
def argmax(_call: OpCall, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _position(x, "argmax", dim, keepdim)


@rule(aten.argmin.default)
def argmin(_call: OpCall, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _position(x, "argmin", dim, keepdim)


@rule(aten.max.dim)
def max_dim(
    call: OpCall, x: Value, dim: int, keepdim: bool = False
) -> tuple[Value | None, Value | None]:
    values = amax(call, x, (dim,), keepdim) if 0 in call.used else None
    return values, _position(x, "argmax", dim, keepdim) if 1 in call.used else None


@rule(aten.min.dim)
def min_dim(
    call: OpCall, x: Value, dim: int, keepdim: bool = False
) -> tuple[Value | None, Value | None]:
    values = amin(call, x, (dim,), keepdim) if 0 in call.used else None
    return values, _position(x, "argmin", dim, keepdim) if 1 in call.used else None


def _truth(x: Value, op: str, dim: int | Sequence[int] | None, keepdim: bool) -> Value:
    return x.cast("bool").reduce(op, axes_of(x, dim), keepdim=keepdim)


@rule(aten.any.default)
def any_all(_call: OpCall, x: Value) -> Value:
    return _truth(x, "any", None, False)


@rule(aten.any.dim, aten.any.dims)
def any_dim(
    _call: OpCall, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False
) -> Value:
    return _truth(x, "any", dim, keepdim)


@rule(aten.all.default)
def all_all(_call: OpCall, x: Value) -> Value:
    return _truth(x, "all", None, False)


@rule(aten.all.dim, aten.all.dims)
def all_dim(
    _call: OpCall, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False
) -> Value:
    return _truth(x, "all", dim, keepdim)


def moments(x: Value, axes: Sequence[int], correction: Number = 0) -> tuple[Value, Value]:
    """Variance and mean of a float value over ``axes``, both with the dims kept."""
    count = math.prod(x.shape[a] for a in axes)
    mean = x.mean(axes, keepdim=True)
    centered = x - mean
    total = (centered * centered).sum(axes, keepdim=True)
    degrees = max(count - correction, 0)
    return total / float(degrees), mean


def _correction(correction: Number | None) -> Number:
    return 1 if correction is None else correction


@rule(aten.var.correction)
def var(
    call: OpCall,
    x: Value,
    dim: Sequence[int] | None = None,
    correction: Number | None = None,
    keepdim: bool = False,
) -> Value:
    del keepdim
    return moments(x.widened(), axes_of(x, dim), _correction(correction))[0].reshape(call.shape)


@rule(aten.std.correction)
def std(
    call: OpCall,
    x: Value,
    dim: Sequence[int] | None = None,
    correction: Number | None = None,
    keepdim: bool = False,
) -> Value:
    return var(call, x, dim, correction, keepdim).apply("sqrt")


@rule(aten.var_mean.correction)
def var_mean(
    call: OpCall,
    x: Value,
    dim: Sequence[int] | None = None,
    correction: Number | None = None,
    keepdim: bool = False,
) -> tuple[Value, Value]:
    del keepdim
    variance, mean = moments(x.widened(), axes_of(x, dim), _correction(correction))
    return variance.reshape(call.shape), mean.reshape(call.shape)


@rule(aten.linalg_vector_norm.default)
def vector_norm(
    call: OpCall,
    x: Value,
    ord: Number = 2,  # noqa: A002
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:
    wide, axes = _wide(call, x, dtype), axes_of(x, dim)
    size = wide.apply("abs")
    if ord in (math.inf, -math.inf):
        return size.reduce("max" if ord > 0 else "min", axes, keepdim=keepdim)
    if ord == 0:
        return wide.differs(0.0).cast(wide.dtype).sum(axes, keepdim=keepdim)
    if ord == 1:
        return size.sum(axes, keepdim=keepdim)
    if ord == 2:
        return (wide * wide).sum(axes, keepdim=keepdim).apply("sqrt")
    return size.apply("pow", float(ord)).sum(axes, keepdim=keepdim).apply("pow", 1.0 / ord)


@rule(aten.logsumexp.default)
def logsumexp(call: OpCall, x: Value, dim: Sequence[int], keepdim: bool = False) -> Value:
    wide, axes = _wide(call, x), axes_of(x, dim)
    top = wide.reduce("max", axes, keepdim=True)
    top = top.apply("isinf", dtype="bool").where(0.0, top)
    total = (wide - top).apply("exp").sum(axes, keepdim=True)
    del keepdim
    return (total.apply("log") + top).reshape(call.shape)


@rule(aten.cumsum.default)
def cumsum(call: OpCall, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """As a masked sum over all pairs, for short dims only."""
    wide = _wide(call, x, dtype)
    if x.ndim == 0:
        return wide
    axis = dim % x.ndim
    size = x.shape[axis]
    if size * x.builder.nodes[x.id].numel > _CUMSUM_LIMIT:
        raise arguments(f"cumsum over {size} elements (too long to be a masked sum)")
    last = wide.moved(axis, x.ndim - 1).unsqueeze(x.ndim - 1)
    pairs = (size, size)
    mask = call.iota(pairs, 1) <= call.iota(pairs, 0)
    return mask.where(last, 0).sum((x.ndim,)).moved(x.ndim - 1, axis)
