"""Operators that only rearrange or copy: views, concatenation, padding and repetition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments
from torch_pruner.dynamo.lower.aten.value import Number, Value, concatenate, iota

if TYPE_CHECKING:
    from collections.abc import Sequence

aten = torch.ops.aten


_MOST_PARTS = 128  # of a concatenation: each is a branch of its own, inside of all before it


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_alias.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view_copy.default,
    aten.squeeze_copy.default,
    aten.unsqueeze_copy.default,
)
def reshape(call: OpCall, x: Value, *_sizes: int | Sequence[int]) -> Value:
    return x.reshape(call.shape)


@rule(
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.alias_copy.default,
    aten.positive.default,
)
def identity(_call: OpCall, x: Value) -> Value:
    return x


@rule(aten._to_copy.default)
def to_copy(call: OpCall, x: Value, dtype: torch.dtype | None = None) -> Value:
    del dtype
    return x.cast(call.dtype)


@rule(aten.copy.default)
def copy(call: OpCall, x: Value, source: Value) -> Value:
    del x
    return source.cast(call.dtype).broadcast(call.shape)


@rule(aten.permute.default, aten.permute_copy.default)
def permute(_call: OpCall, x: Value, dims: Sequence[int]) -> Value:
    return x.permute([d % x.ndim for d in dims])


@rule(aten.t.default)
def t(_call: OpCall, x: Value) -> Value:
    return x.swapped() if x.ndim == 2 else x


@rule(aten.transpose.int)
def transpose(_call: OpCall, x: Value, dim0: int, dim1: int) -> Value:
    order = list(range(x.ndim))
    if order:
        a, b = dim0 % x.ndim, dim1 % x.ndim
        order[a], order[b] = order[b], order[a]
    return x.permute(order)


@rule(aten.expand.default, aten.expand_copy.default)
def expand(call: OpCall, x: Value, size: Sequence[int], implicit: bool = False) -> Value:
    del size, implicit
    return x.broadcast(call.shape)


@rule(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_tensor(
    call: OpCall,
    x: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    del end
    axis = dim % x.ndim
    first, _, hop = slice(start, None, step).indices(x.shape[axis])
    if call.sized and x.shape[axis] == call.shape[axis]:
        return x.whole()
    return x.narrow(axis, first, call.shape[axis], hop)


@rule(aten.narrow.default)
def narrow(_call: OpCall, x: Value, dim: int, start: int, length: int) -> Value:
    axis = dim % x.ndim
    return x.narrow(axis, start % x.shape[axis], length)


@rule(aten.select.int, aten.select_copy.int)
def select(_call: OpCall, x: Value, dim: int, index: int) -> Value:
    axis = dim % x.ndim
    return x.select(axis, index % x.shape[axis])


@rule(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
def split(call: OpCall, x: Value, size: int | Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    del size
    axis, start, parts = dim % x.ndim, 0, []
    for i in range(len(call.outputs)):
        length = call.shape_of(i)[axis]
        parts.append(x.narrow(axis, start, length))
        start += length
    return tuple(parts)


@rule(aten.unbind.int)
def unbind(_call: OpCall, x: Value, dim: int = 0) -> tuple[Value, ...]:
    axis = dim % x.ndim
    return tuple(x.select(axis, i) for i in range(x.shape[axis]))


@rule(aten.as_strided.default)
def as_strided(
    _call: OpCall,
    x: Value,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None = None,
) -> Value:
    """Only where the result is the whole tensor in another shape, or a tensor seen as it is."""
    fake = x.fake
    if fake is None or not fake.is_contiguous() or fake.storage_offset() != (offset or 0):
        raise arguments("as_strided of a tensor that is not contiguous")
    expected, count = [], 1
    for extent in reversed(size):
        expected.append(count)
        count *= extent
    wanted = [s for s, n in zip(stride, size, strict=True) if n != 1]
    dense = [s for s, n in zip(reversed(expected), size, strict=True) if n != 1]
    total = fake.numel()
    if wanted != dense or count > total:
        raise arguments("as_strided that is not a contiguous view")
    return x.reshape((total,)).narrow(0, 0, count).reshape(size)


@rule(aten.diagonal.default)
def diagonal(call: OpCall, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    a, b = dim1 % x.ndim, dim2 % x.ndim
    rest = [i for i in range(x.ndim) if i not in (a, b)]
    moved = x.permute([*rest, a, b])
    length, columns = call.shape[-1], x.shape[b]
    flat = moved.reshape((*moved.shape[:-2], x.shape[a] * columns))
    start = offset if offset >= 0 else -offset * columns
    return flat.narrow(flat.ndim - 1, start, length, columns + 1)


@rule(aten.unfold.default)
def unfold(call: OpCall, x: Value, dim: int, size: int, step: int) -> Value:
    if x.ndim == 0:
        raise arguments("unfold of a scalar")
    axis, count = dim % x.ndim, call.shape[dim % x.ndim]
    starts = iota(x.builder, count) * step
    index = starts.unsqueeze(1) + iota(x.builder, size).unsqueeze(0)
    return x.take(axis, index).moved(axis + 1, x.ndim)


@rule(aten.flip.default)
def flip(_call: OpCall, x: Value, dims: Sequence[int]) -> Value:
    return x.flip(sorted(d % x.ndim for d in dims) if x.ndim else ())


@rule(aten.cat.default)
def cat(call: OpCall, tensors: Sequence[Value], dim: int = 0) -> Value:
    parts = [v.cast(call.dtype) for v in tensors if 0 not in v.shape]
    if len(parts) > _MOST_PARTS:
        raise arguments(f"more than {_MOST_PARTS} tensors in one")
    return concatenate(parts, dim % len(call.shape))


@rule(aten.stack.default)
def stack(call: OpCall, tensors: Sequence[Value], dim: int = 0) -> Value:
    axis = dim % len(call.shape)
    if len(tensors) > _MOST_PARTS:
        raise arguments(f"more than {_MOST_PARTS} tensors in one")
    return concatenate([v.cast(call.dtype).unsqueeze(axis) for v in tensors], axis)


@rule(aten.repeat.default)
def repeat(call: OpCall, x: Value, repeats: Sequence[int]) -> Value:
    source = (1,) * (len(repeats) - x.ndim) + x.shape
    inner = [d for s in source for d in (1, s)]
    outer = [d for r, s in zip(repeats, source, strict=True) for d in (r, s)]
    return x.reshape(inner).broadcast(outer).reshape(call.shape)


@rule(aten.roll.default)
def roll(_call: OpCall, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    shape = x.shape
    flat = not dims
    out = x.reshape((_numel(shape),)) if flat else x
    for shift, dim in zip(shifts, dims or (0,), strict=True):
        axis = dim % out.ndim
        size = out.shape[axis]
        cut = (-shift) % size
        if cut:
            parts = [out.narrow(axis, cut, size - cut), out.narrow(axis, 0, cut)]
            out = concatenate(parts, axis)
    return out.reshape(shape)


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


@rule(aten.constant_pad_nd.default)
def constant_pad(_call: OpCall, x: Value, pad: Sequence[int], value: Number = 0) -> Value:
    out = x
    lo, hi = [0] * x.ndim, [0] * x.ndim
    for i in range(len(pad) // 2):
        axis, before, after = x.ndim - 1 - i, pad[2 * i], pad[2 * i + 1]
        crop = max(-before, 0), max(-after, 0)
        out = out.narrow(axis, crop[0], out.shape[axis] - sum(crop)) if any(crop) else out
        lo[axis], hi[axis] = max(before, 0), max(after, 0)
    return out.pad(lo, hi, value)


def _padded_index(builder_of: Value, size: int, before: int, after: int, mode: str) -> Value:
    """The source index of each element after reflection or replication padding."""
    position = iota(builder_of.builder, before + size + after) - before
    if mode == "reflect":
        return (size - 1) - ((size - 1) - position.apply("abs")).apply("abs")
    return position.maximum(0).minimum(size - 1)


def _pad_by_take(x: Value, pad: Sequence[int], mode: str) -> Value:
    out = x
    for i in range(len(pad) // 2):
        axis, before, after = x.ndim - 1 - i, pad[2 * i], pad[2 * i + 1]
        if before < 0 or after < 0:
            raise arguments("negative reflection or replication padding")
        if before or after:
            out = out.take(axis, _padded_index(x, x.shape[axis], before, after, mode))
    return out


@rule(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(_call: OpCall, x: Value, pad: Sequence[int]) -> Value:
    return _pad_by_take(x, pad, "reflect")


@rule(
    aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default
)
def replication_pad(_call: OpCall, x: Value, pad: Sequence[int]) -> Value:
    return _pad_by_take(x, pad, "replicate")


@rule(aten.slice_scatter.default)
def slice_scatter(
    call: OpCall,
    x: Value,
    source: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    axis, size = dim % x.ndim, x.shape[dim % x.ndim]
    first, _, hop = slice(start, end, step).indices(size)
    part, count = source.cast(x.dtype), source.shape[axis]
    if call.in_place:
        return x.updated(axis, [iota(x.builder, count) * hop + first], part, in_place=True)
    if hop == 1:
        return replaced(x, axis, first, part)
    position = iota(x.builder, size) - first
    slot = position.apply("floordiv", hop)
    inside = (position >= 0) & (slot < count) & position.apply("mod", hop).equals(0)
    spread = part.take(axis, slot.maximum(0).minimum(count - 1))
    mask = inside.reshape([size if i == axis else 1 for i in range(x.ndim)])
    return mask.where(spread, x)


def replaced(x: Value, axis: int, first: int, part: Value) -> Value:
    """``x`` with ``part`` in place of what lies along ``axis`` from ``first`` on."""
    after = first + part.shape[axis]
    rest = x.shape[axis] - after
    pieces = [x.narrow(axis, 0, first)] if first else []
    pieces.append(part)
    pieces += [x.narrow(axis, after, rest)] if rest else []
    return concatenate(pieces, axis)


@rule(aten.select_scatter.default)
def select_scatter(call: OpCall, x: Value, source: Value, dim: int, index: int) -> Value:
    axis = dim % x.ndim
    at = index % x.shape[axis]
    return slice_scatter(call, x, source.unsqueeze(axis), axis, at, at + 1)


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(call: OpCall, x: Value, factor: int) -> Value:
    *lead, channels, height, width = x.shape
    rank = len(lead)
    split_shape = (*lead, channels // factor**2, factor, factor, height, width)
    order = [*range(rank), *(rank + i for i in (0, 3, 1, 4, 2))]
    return x.reshape(split_shape).permute(order).reshape(call.shape)


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(call: OpCall, x: Value, factor: int) -> Value:
    *lead, channels, height, width = x.shape
    rank = len(lead)
    split_shape = (*lead, channels, height // factor, factor, width // factor, factor)
    order = [*range(rank), *(rank + i for i in (0, 2, 4, 1, 3))]
    return x.reshape(split_shape).permute(order).reshape(call.shape)
