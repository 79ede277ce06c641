"""Nearest-neighbour and linear resizing, with their gradients.

Forward, a resized dim is one or two takes; backward, a product with the matrix of their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.pooling_gradients import along, through_matrices
from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.value import Value, iota

if TYPE_CHECKING:
    from torch_pruner.graph.ir import GraphBuilder

aten = torch.ops.aten

Scales = Sequence[float | None] | None


def _step(old: int, new: int, scale: float | None) -> float:
    """Source elements per result element."""
    return 1.0 / scale if scale else old / new


def _scale(scales: Scales, dim: int) -> float | None:
    return scales[dim] if scales else None


def _nearest_index(
    builder: GraphBuilder, old: int, new: int, scale: float | None, exact: bool
) -> Value:
    position = iota(builder, new).cast("float32")
    if exact:
        position = position + 0.5
    return (position * _step(old, new, scale)).cast("int64").minimum(old - 1)


def _nearest(call: OpCall, x: Value, scales: Scales, *, exact: bool = False) -> Value:
    out = x
    for i, axis in enumerate(range(2, x.ndim)):
        old, new = x.shape[axis], call.shape[axis]
        out = out.take(axis, _nearest_index(x.builder, old, new, _scale(scales, i), exact))
    return out


@rule(aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec)
def nearest_vec(call: OpCall, x: Value, _size: Sequence[int] | None, factors: Scales) -> Value:
    return _nearest(call, x, factors)


@rule(
    aten.upsample_nearest1d.default, aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
)  # fmt: skip
def nearest(
    call: OpCall,
    x: Value,
    _size: Sequence[int] | None,
    *scales: float | None,
    **named: float | None,
) -> Value:
    return _nearest(call, x, (*scales, *named.values()))


@rule(
    aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
)  # fmt: skip
def nearest_exact(
    call: OpCall,
    x: Value,
    _size: Sequence[int] | None,
    *scales: float | None,
    **named: float | None,
) -> Value:
    return _nearest(call, x, (*scales, *named.values()), exact=True)


@rule(
    aten.upsample_nearest1d_backward.default, aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default,
)  # fmt: skip
def nearest_backward(
    call: OpCall,
    grad: Value,
    _output_size: Sequence[int] | None,
    _input_size: Sequence[int] | None,
    *scales: float | None,
    **named: float | None,
) -> Value:
    wide, given, matrices = grad.widened(), (*scales, *named.values()), []
    for i, axis in enumerate(range(2, grad.ndim)):
        old, new = call.shape[axis], grad.shape[axis]
        index = _nearest_index(grad.builder, old, new, _scale(given, i), False).unsqueeze(1)
        matrices.append(iota(grad.builder, old).equals(index).cast(wide.dtype))
    return through_matrices(wide, matrices)


def _neighbours(
    builder: GraphBuilder, old: int, new: int, align_corners: bool, scale: float | None
) -> tuple[Value, Value, Value]:
    """For each result element, two source positions and the weight of the second (float32)."""
    index = iota(builder, new).cast("float32")
    if align_corners:
        position = index * ((old - 1) / (new - 1) if new > 1 else 0.0)
    else:
        position = ((index + 0.5) * _step(old, new, scale) - 0.5).maximum(0.0)
    low = position.cast("int64").minimum(old - 1)
    weight = (position - low.cast("float32")).maximum(0.0).minimum(1.0)
    return low, (low + 1).minimum(old - 1), weight


def _linear(call: OpCall, x: Value, align_corners: bool, scales: Scales) -> Value:
    out = x.widened()
    for i, axis in enumerate(range(2, x.ndim)):
        old, new = x.shape[axis], call.shape[axis]
        low, high, weight = _neighbours(x.builder, old, new, align_corners, _scale(scales, i))
        share = along(weight.cast(out.dtype), axis, x.ndim)
        out = out.take(axis, low) * (1.0 - share) + out.take(axis, high) * share
    return out


@rule(aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_trilinear3d.vec)
def linear_vec(
    call: OpCall, x: Value, _size: Sequence[int] | None, align_corners: bool, factors: Scales
) -> Value:
    return _linear(call, x, align_corners, factors)


@rule(
    aten.upsample_linear1d.default, aten.upsample_bilinear2d.default,
    aten.upsample_trilinear3d.default,
)  # fmt: skip
def linear(
    call: OpCall,
    x: Value,
    _size: Sequence[int] | None,
    align_corners: bool,
    *scales: float | None,
    **named: float | None,
) -> Value:
    return _linear(call, x, align_corners, (*scales, *named.values()))


@rule(
    aten.upsample_linear1d_backward.default, aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
)  # fmt: skip
def linear_backward(
    call: OpCall,
    grad: Value,
    _output_size: Sequence[int] | None,
    _input_size: Sequence[int] | None,
    align_corners: bool,
    *scales: float | None,
    **named: float | None,
) -> Value:
    wide, given, matrices = grad.widened(), (*scales, *named.values()), []
    for i, axis in enumerate(range(2, grad.ndim)):
        old, new = call.shape[axis], grad.shape[axis]
        low, high, weight = _neighbours(grad.builder, old, new, align_corners, _scale(given, i))
        column, share = iota(grad.builder, old), weight.cast(wide.dtype).unsqueeze(1)
        near = column.equals(low.unsqueeze(1)).cast(wide.dtype) * (1.0 - share)
        far = column.equals(high.unsqueeze(1)).cast(wide.dtype) * share
        matrices.append(near + far)
    return through_matrices(wide, matrices)
