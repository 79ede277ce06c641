"""Operators that move, cut, join and index."""

from __future__ import annotations

import math

import numpy as np
import torch

from torch_pruner.onnx.operators.registry import (
    TABLE,
    DataDependentError,
    OperatorCall,
    Result,
    Tensor,
    in_range,
    op,
    wide,
)


@op("Shape")
def _shape(n: OperatorCall, x: Tensor) -> Tensor:
    start, end = n.attr("start", 0), n.attr("end", None)
    return torch.tensor(list(x.shape)[slice(start, end)], dtype=torch.int64)


@op("Size")
def _size(n: OperatorCall, x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


@op("Reshape")
def _reshape(n: OperatorCall, x: Tensor, _: Tensor) -> Tensor:
    shape = n.ints(1) or []
    if not n.attr("allowzero", 0):
        shape = [x.shape[k] if d == 0 else d for k, d in enumerate(shape)]
    return x.reshape(shape)


@op("Flatten")
def _flatten(n: OperatorCall, x: Tensor) -> Tensor:
    axis = in_range(n.attr("axis", 1), x.dim())
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@op("Squeeze")
def _squeeze(n: OperatorCall, x: Tensor, _: Tensor | None = None) -> Tensor:
    axes = n.ints(1) if n.opset >= 13 else n.attr("axes")
    if axes is None:
        return x.squeeze()
    gone = {in_range(a, x.dim()) for a in axes}
    return x.reshape([d for a, d in enumerate(x.shape) if a not in gone])


@op("Unsqueeze")
def _unsqueeze(n: OperatorCall, x: Tensor, _: Tensor | None = None) -> Tensor:
    axes = (n.ints(1) if n.opset >= 13 else n.attr("axes")) or []
    rank = x.dim() + len(axes)
    shape = list(x.shape)
    for a in sorted(in_range(a, rank) for a in axes):
        shape.insert(a, 1)
    return x.reshape(shape)


@op("Transpose")
def _transpose(n: OperatorCall, x: Tensor) -> Tensor:
    return x.permute(n.attr("perm") or list(range(x.dim()))[::-1])


@op("Concat")
def _concat(n: OperatorCall, *parts: Tensor) -> Tensor:
    return torch.cat(parts, dim=n.attr("axis"))


@op("Split")
def _split(n: OperatorCall, x: Tensor, _: Tensor | None = None) -> Result:
    axis = in_range(n.attr("axis", 0), x.dim())
    sizes = n.ints(1) if n.opset >= 13 else n.attr("split")
    if sizes is None:
        each = -(-x.shape[axis] // n.n_outputs)
        sizes = [each] * (n.n_outputs - 1)
        sizes.append(x.shape[axis] - sum(sizes))
    return tuple(torch.split(x, sizes, dim=axis))


@op("Slice")
def _slice(n: OperatorCall, x: Tensor, *_: Tensor) -> Tensor:
    if n.opset < 10:
        starts, ends, axes, steps = n.attr("starts"), n.attr("ends"), n.attr("axes"), None
    else:
        starts, ends, axes, steps = (n.ints(k) for k in (1, 2, 3, 4))
    starts, ends = starts or [], ends or []
    axes = list(range(len(starts))) if axes is None else [in_range(a, x.dim()) for a in axes]
    for axis, start, end, step in zip(axes, starts, ends, steps or [1] * len(axes), strict=True):
        picked = range(x.shape[axis])[start:end:step]
        if step > 0:
            where = slice(picked.start, picked.stop, step) if len(picked) else slice(0, 0)
            x = x[(slice(None),) * axis + (where,)]
        else:
            n.afford(8 * len(picked))
            backwards = np.arange(picked.start, picked.stop, picked.step)
            x = x.index_select(axis, torch.from_numpy(backwards))
    return x


def _positive(index: Tensor, size: int) -> Tensor:
    index = index.to(torch.int64)
    return torch.where(index < 0, index + size, index)


@op("Gather")
def _gather(n: OperatorCall, x: Tensor, index: Tensor) -> Tensor:
    axis = in_range(n.attr("axis", 0), x.dim())
    flat = _positive(index, x.shape[axis]).reshape(-1)
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    return torch.index_select(x, axis, flat).reshape(shape)


@op("GatherElements")
def _gather_elements(n: OperatorCall, x: Tensor, index: Tensor) -> Tensor:
    axis = in_range(n.attr("axis", 0), x.dim())
    return torch.gather(x, axis, _positive(index, x.shape[axis]))


def _linear(index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Positions in a flattened array of ``shape``, of index tuples along the last dimension."""
    total = torch.zeros(index.shape[:-1], dtype=torch.int64)
    for k, size in enumerate(shape):
        total = total * size + _positive(index[..., k], size)
    return total


@op("GatherND")
def _gather_nd(n: OperatorCall, x: Tensor, index: Tensor) -> Tensor:
    batch, depth = n.attr("batch_dims", 0), index.shape[-1]
    lead, rest = tuple(x.shape[:batch]), tuple(x.shape[batch + depth :])
    count = math.prod(lead)
    inner = tuple(x.shape[batch : batch + depth])
    flat = x.reshape(count, math.prod(inner), *rest)
    where = _linear(index.reshape(count, -1, depth), inner)
    which = torch.arange(count).unsqueeze(1).expand_as(where)
    return flat[which, where].reshape(*index.shape[:-1], *rest)


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@op("ScatterElements", "Scatter")
def _scatter_elements(n: OperatorCall, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    axis = in_range(n.attr("axis", 0), x.dim())
    where, how = _positive(index, x.shape[axis]), n.attr("reduction", "none")
    if how == "none":
        return x.scatter(axis, where, updates)
    return x.scatter_reduce(axis, where, updates, _REDUCTIONS[how], include_self=True)


@op("ScatterND")
def _scatter_nd(n: OperatorCall, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    depth, how = index.shape[-1], n.attr("reduction", "none")
    inner, rest = tuple(x.shape[:depth]), tuple(x.shape[depth:])
    width = math.prod(rest)
    where = _linear(index, inner).reshape(-1, 1) * width + torch.arange(width)
    flat, values = x.reshape(-1), updates.reshape(-1)
    if how == "none":
        return flat.scatter(0, where.reshape(-1), values).reshape(x.shape)
    result = flat.scatter_reduce(0, where.reshape(-1), values, _REDUCTIONS[how], include_self=True)
    return result.reshape(x.shape)


@op("TensorScatter")
def _tensor_scatter(
    n: OperatorCall, past: Tensor, update: Tensor, start: Tensor | None = None
) -> Tensor:
    axis = in_range(n.attr("axis", -2), past.dim())
    size, length = past.shape[axis], update.shape[axis]
    begin = (
        torch.zeros(past.shape[0], dtype=torch.int64) if start is None else start.to(torch.int64)
    )
    where = begin[:, None] + torch.arange(length)
    where = where % size if n.attr("mode", "linear") == "circular" else where
    shape = [1] * past.dim()
    shape[0], shape[axis] = past.shape[0], length
    return past.scatter(axis, where.reshape(shape).expand_as(update), update)


@op("Expand")
def _expand(n: OperatorCall, x: Tensor, _: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(tuple(x.shape), tuple(n.ints(1) or ()))
    return x.expand(shape).clone()


@op("Tile")
def _tile(n: OperatorCall, x: Tensor, *_: Tensor) -> Tensor:
    return x.repeat(n.ints(1) or [])


@op("Pad")
def _pad(n: OperatorCall, x: Tensor, *_: Tensor) -> Tensor:
    pads = (n.attr("pads") if n.opset < 11 else n.ints(1)) or []
    fill = n.attr("value", 0.0) if n.opset < 11 else n.scalar(2, 0)
    axes = n.ints(3) if n.opset >= 18 else None
    axes = list(range(x.dim())) if axes is None else [in_range(a, x.dim()) for a in axes]
    mode, half = n.attr("mode", "constant"), len(pads) // 2
    for k, axis in enumerate(axes):
        low, high = pads[k], pads[k + half]
        x = _padded(n, x, axis, low, high, mode, fill)
    return x


def _padded(
    n: OperatorCall, x: Tensor, axis: int, low: int, high: int, mode: str, fill: float
) -> Tensor:
    size = x.shape[axis]
    if low < 0 or high < 0:  # cut
        begin, end = max(-low, 0), size - max(-high, 0)
        x, size = x.narrow(axis, begin, end - begin), end - begin
        low, high = max(low, 0), max(high, 0)
    if not low and not high:
        return x
    if mode == "constant":
        shape = list(x.shape)
        parts = []
        for count in (low, high):
            shape[axis] = count
            parts.append(torch.full(shape, fill, dtype=x.dtype, device=x.device))
        return torch.cat([parts[0], x, parts[1]], dim=axis)
    n.afford(8 * (low + size + high))
    where = np.arange(-low, size + high)
    if mode == "edge":
        where = where.clip(0, size - 1)
    elif mode == "wrap":
        where = where % size
    else:
        period = max(2 * (size - 1), 1)
        where = np.abs((where + size - 1) % period - (size - 1)) if size > 1 else where * 0
    return x.index_select(axis, torch.from_numpy(where.astype(np.int64)))


@op("ConstantOfShape")
def _constant_of_shape(n: OperatorCall, _: Tensor) -> Tensor:
    value = n.attr("value")
    shape = n.ints(0) or []
    if value is None:
        return torch.zeros(shape)
    return (
        torch.from_numpy(np.asarray(value).reshape(-1))
        .expand(max(math.prod(shape), 0))
        .reshape(shape)
        .clone()
    )


@op("Range")
def _range(n: OperatorCall, start: Tensor, *_: Tensor) -> Tensor:
    begin, end, step = (n.scalar(k) for k in range(3))
    count = max(math.ceil((end - begin) / step), 0)
    return (torch.arange(count, dtype=torch.float64) * step + begin).to(start.dtype)


@op("EyeLike")
def _eye(n: OperatorCall, x: Tensor) -> Tensor:
    from torch_pruner.onnx.operators.types import torch_dtype

    kind = torch_dtype(n.attr("dtype")) if n.attr("dtype") else x.dtype
    rows, columns = x.shape
    below = torch.arange(columns)[None, :] - torch.arange(rows)[:, None]
    return (below == n.attr("k", 0)).to(kind)


@op("Trilu")
def _trilu(n: OperatorCall, x: Tensor, _: Tensor | None = None) -> Tensor:
    k = int(n.scalar(1, 0))
    away = torch.arange(x.shape[-1])[None, :] - torch.arange(x.shape[-2])[:, None]
    kept = away >= k if n.attr("upper", 1) else away <= k
    return torch.where(kept, x, torch.zeros_like(x))


@op("OneHot")
def _one_hot(n: OperatorCall, index: Tensor, _: Tensor, values: Tensor) -> Tensor:
    depth = int(n.scalar(1))
    axis = in_range(n.attr("axis", -1), index.dim() + 1)
    whole = index.to(torch.int64)
    whole = torch.where(whole < 0, whole + depth, whole).unsqueeze(axis)
    shape = [1] * (index.dim() + 1)
    shape[axis] = depth
    return torch.where(whole == torch.arange(depth).reshape(shape), values[1], values[0])


@op("DepthToSpace")
def _depth_to_space(n: OperatorCall, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    s = n.attr("blocksize")
    if n.attr("mode", "DCR") == "DCR":
        parts = x.reshape(b, s, s, c // (s * s), h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(b, c // (s * s), s, s, h, w).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(b, c // (s * s), h * s, w * s)


@op("SpaceToDepth")
def _space_to_depth(n: OperatorCall, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    s = n.attr("blocksize")
    depth_first = n.attr("mode", "DCR") == "DCR"
    order = (0, 3, 5, 1, 2, 4) if depth_first else (0, 1, 3, 5, 2, 4)
    parts = x.reshape(b, c, h // s, s, w // s, s).permute(order)
    return parts.reshape(b, c * s * s, h // s, w // s)


@op("ReverseSequence")
def _reverse_sequence(n: OperatorCall, x: Tensor, lengths: Tensor) -> Tensor:
    time, batch = n.attr("time_axis", 0), n.attr("batch_axis", 1)
    t = torch.arange(x.shape[time])
    where = lengths.to(torch.int64)[:, None] - 1 - t[None, :]
    where = torch.where(where >= 0, where, t[None, :])  # (batch, time)
    where = where if batch < time else where.T
    shape = [1] * x.dim()
    shape[time], shape[batch] = x.shape[time], x.shape[batch]
    return torch.gather(x, time, where.reshape(shape).expand_as(x))


@op("NonZero")
def _nonzero(n: OperatorCall, x: Tensor) -> Tensor:
    _real(x)
    found = torch.from_numpy(np.argwhere(np.atleast_1d(np.asarray(n.host(0)))).astype(np.int64))
    return found.T.contiguous() if x.dim() else found.T[:0]


@op("Compress")
def _compress(n: OperatorCall, x: Tensor, condition: Tensor) -> Tensor:
    axis = n.attr("axis")
    x = x.reshape(-1) if axis is None else x
    kept = np.asarray(n.host(1)).reshape(-1).nonzero()[0]
    return x.index_select(axis or 0, torch.from_numpy(kept.astype(np.int64)))


@op("Unique")
def _unique(n: OperatorCall, x: Tensor) -> Result:
    _real(x)
    axis = n.attr("axis")
    found = np.unique(
        x.numpy(), return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    values, first, inverse, counts = found
    if not n.attr("sorted", 1):
        order = np.argsort(first)
        values = np.take(values, order, axis=axis or 0)
        first, counts = first[order], counts[order]
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        inverse = rank[inverse]
    parts = (first, inverse.reshape(-1), counts)
    return torch.from_numpy(values.copy()), *(torch.from_numpy(p.astype(np.int64)) for p in parts)


def _real(x: Tensor) -> None:
    """The shape of the result depends on the numbers in ``x``."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(x, FakeTensor) or type(x) not in (Tensor, torch.nn.Parameter):
        raise DataDependentError


@op("CenterCropPad")
def _center_crop_pad(n: OperatorCall, x: Tensor, _: Tensor) -> Tensor:
    axes = n.attr("axes") or list(range(x.dim()))
    for axis, size in zip(axes, n.ints(1) or [], strict=True):
        axis = in_range(axis, x.dim())
        have = x.shape[axis]
        if size < have:
            x = x.narrow(axis, (have - size) // 2, size)
        elif size > have:
            low = (size - have) // 2
            x = _padded(n, x, axis, low, size - have - low, "constant", 0)
    return x


# Unsigned integers of more than a byte can be moved but not selected by index.
for _name in ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "Pad"):
    TABLE[_name] = wide(TABLE[_name])
