"""Reads and writes at computed positions: embedding, gather, advanced indexing, updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments
from torch_pruner.dynamo.lower.aten.value import Value
from torch_pruner.dynamo.lower.aten.views import replaced
from torch_pruner.graph.intervals import interval
from torch_pruner.graph.ir import broadcast_shapes

if TYPE_CHECKING:
    from collections.abc import Sequence

aten = torch.ops.aten

_ADDED = ("float32", "int32", "int64")  # others are rounded, or wrap, with every addition


@rule(aten.embedding.default)
def embedding(
    call: OpCall,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    del padding_idx, scale_grad_by_freq, sparse
    call.demand_index(indices, weight.shape, 0, "embedding")
    return weight.take(0, indices)


@rule(aten.index_select.default)
def index_select(call: OpCall, x: Value, dim: int, index: Value) -> Value:
    if x.ndim == 0:
        raise arguments("index_select of a scalar")
    call.demand_index(index, x.shape, dim % x.ndim, "index_select")
    return x.take(dim % x.ndim, index.reshape((_count(index),)))


def _count(index: Value) -> int:
    return index.builder.nodes[index.id].numel


@rule(aten.gather.default)
def gather(call: OpCall, x: Value, dim: int, index: Value, sparse_grad: bool = False) -> Value:
    del sparse_grad
    if x.ndim == 0 or index.ndim != x.ndim:
        raise arguments("gather of a scalar")
    axis = dim % x.ndim
    call.demand_index(index, x.shape, axis, "gather")
    shape = [x.shape[i] if i == axis else n for i, n in enumerate(index.shape)]
    cut = x.slice([0] * x.ndim, shape)
    ids = x.builder.append("gather", (cut.id, index.id), call.shape, x.dtype, dim=axis)
    return Value(x.builder, ids)


@rule(aten.index.Tensor)
def index_tensor(call: OpCall, x: Value, indices: Sequence[Value | None]) -> Value:
    pairs = zip(indices, x.shape, strict=False)
    used = [(index, size) for index, size in pairs if index is not None]
    for k, (index, _) in enumerate(used):  # eager counts the dimensions that are indexed
        call.demand_index(index, [size for _, size in used], k, "index", wraps=True)
    return unsafe_index(call, x, indices)


@rule(aten._unsafe_index.Tensor)
def unsafe_index(_call: OpCall, x: Value, indices: Sequence[Value | None]) -> Value:
    """``index`` whose positions are promised to lie within."""
    axes = [i for i, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if any(index.dtype in ("bool", "uint8") for index in tensors):
        raise arguments("indexing with a mask, whose result has a data-dependent shape")
    adjacent = axes == list(range(axes[0], axes[-1] + 1))
    if adjacent and len(axes) > 1 and (one_by_one := _taken_apart(x, axes[0], tensors)) is not None:
        return one_by_one
    front = axes[0] if adjacent else 0
    rest = [i for i in range(x.ndim) if i not in axes]
    moved = x.permute([*rest[:front], *axes, *rest[front:]])
    sizes = [x.shape[a] for a in axes]
    total = 1
    for size in sizes:
        total *= size
    merged = moved.reshape((*moved.shape[:front], total, *moved.shape[front + len(axes) :]))
    return merged.take(front, _flat_index(tensors, sizes))


def _taken_apart(x: Value, first: int, tensors: Sequence[Value]) -> Value | None:
    """What several tensors name along axes from ``first`` on, one axis after the other.

    None unless each axis of the result belongs to one of the tensors, as rows and columns do. So no
    position depends on how long the axes are.
    """
    rank = max(tensor.ndim for tensor in tensors)
    shapes = [(1,) * (rank - tensor.ndim) + tensor.shape for tensor in tensors]
    owned = [[axis for axis, n in enumerate(shape) if n != 1] for shape in shapes]
    order = [axis for axes in owned for axis in axes]
    if len(set(order)) < len(order):
        return None
    for k, tensor in enumerate(tensors):
        line = tensor.reshape((_count(tensor),))
        if not _is_everything(line, x.shape[first + k]):
            x = x.take(first + k, line)
    head, tail = x.shape[:first], x.shape[first + len(tensors) :]
    apart = [shape[axis] for shape, axes in zip(shapes, owned, strict=True) for axis in axes]
    found = x.reshape((*head, *apart, *tail))
    places = [first + order.index(axis) for axis in sorted(order)]
    behind = range(first + len(order), found.ndim)
    shape: tuple[int, ...] = ()
    for one in shapes:
        shape = broadcast_shapes(shape, one)
    return found.permute([*range(first), *places, *behind]).reshape((*head, *shape, *tail))


def _is_everything(index: Value, size: int) -> bool:
    """Whether an index of one axis names all of ``size`` positions in their order."""
    node = index.builder.nodes[index.id]
    return node.op == "iota" and node.shape == (size,)


def _flat_index(tensors: Sequence[Value], sizes: Sequence[int]) -> Value:
    """The row-major position that several index tensors name together."""
    if len(tensors) == 1:
        return tensors[0]
    shape: tuple[int, ...] = ()
    for tensor in tensors:
        shape = broadcast_shapes(shape, tensor.shape)
    flat: Value | None = None
    for tensor, size in zip(tensors, sizes, strict=True):
        index = tensor.cast("int64")
        index = (index < 0).where(index + size, index)
        flat = index if flat is None else flat * size + index
    assert flat is not None
    return flat.broadcast(shape)


@rule(aten.index_copy.default)
def index_copy(call: OpCall, x: Value, dim: int, index: Value, source: Value) -> Value:
    if x.ndim == 0:
        raise arguments("index_copy to a scalar")
    axis = dim % x.ndim
    call.demand_index(index, x.shape, axis, "index_copy")
    shape = tuple(_count(index) if i == axis else n for i, n in enumerate(x.shape))
    positions = index.reshape((_count(index),))
    return x.updated(axis, [positions], source.reshape(shape), in_place=call.in_place)


@rule(aten.index_add.default)
def index_add(
    call: OpCall, x: Value, dim: int, index: Value, source: Value, alpha: float = 1
) -> Value:
    if x.ndim == 0 or x.dtype not in _ADDED:
        raise arguments("index_add to a scalar, or of a type that is not added here")
    axis = dim % x.ndim
    call.demand_index(index, x.shape, axis, "index_add")
    shape = tuple(_count(index) if i == axis else n for i, n in enumerate(x.shape))
    rows = source.reshape(shape)
    rows = rows if alpha == 1 else (rows * alpha).cast(x.dtype)
    return x.accumulated(axis, [index.reshape((_count(index),))], rows)


@rule(aten.scatter_add.default)
def scatter_add(call: OpCall, x: Value, dim: int, index: Value, source: Value) -> Value:
    """Where one position holds for a whole row, as graph networks have it."""
    if x.ndim == 0 or x.dtype not in _ADDED:
        raise arguments("scatter_add to a scalar, or of a type that is not added here")
    axis = dim % x.ndim
    others = [i for i in range(x.ndim) if i != axis]
    if any(index.shape[i] != x.shape[i] for i in others):
        raise arguments("scatter_add of a part of the rows")
    line = _one_for_a_row(index, axis)
    if line is None:
        raise arguments("scatter_add at positions that differ within a row")
    call.demand_index(line, x.shape, axis, "scatter_add")
    return x.accumulated(axis, [line], source.slice([0] * x.ndim, index.shape))


def _one_for_a_row(index: Value, axis: int) -> Value | None:
    """The positions along ``axis`` if they are repeated along all others, as strides tell."""
    assert index.fake is not None
    shape, strides = index.shape, index.fake.stride()
    if any(n > 1 and strides[k] for k, n in enumerate(shape) if k != axis):
        return None
    starts, ends = [0] * len(shape), [n if k == axis else 1 for k, n in enumerate(shape)]
    return index.slice(starts, ends).reshape((shape[axis],))


@rule(aten.index_put.default)
def index_put(
    call: OpCall,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Value:
    if accumulate and x.dtype not in _ADDED:
        raise arguments("index_put that adds what is not added here")
    axes = [i for i, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if any(index.dtype in ("bool", "uint8") for index in tensors):
        raise arguments("index_put with a mask")
    if not axes or axes != list(range(axes[0], axes[-1] + 1)):
        raise arguments("index_put at positions along axes that are not neighbours")
    sizes = [x.shape[a] for a in axes]
    shape: tuple[int, ...] = ()
    for k, index in enumerate(tensors):  # eager counts the dimensions that are indexed
        call.demand_index(index, sizes, k, "index_put", wraps=True)
        shape = broadcast_shapes(shape, index.shape)
    rows = values.cast(x.dtype).broadcast((*x.shape[: axes[0]], *shape, *x.shape[axes[-1] + 1 :]))
    at = [index.cast("int64").broadcast(shape) for index in tensors]
    if accumulate:
        return x.accumulated(axes[0], at, rows)
    known = interval(x.builder.nodes, at[0].id) if len(at) == _count(at[0]) == 1 else (0, 1)
    if known[0] == known[1] and not call.in_place:  # a number, as where a window moves on
        row = rows.reshape(tuple(1 if i == axes[0] else n for i, n in enumerate(x.shape)))
        return replaced(x, axes[0], known[0] % sizes[0], row)
    return x.updated(axes[0], at, rows, in_place=call.in_place)
