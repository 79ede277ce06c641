"""Evaluate a ``Graph`` with numpy: the oracle for code generators and for measured candidates.

Written to be obviously right rather than fast; contractions go through BLAS so that model-sized
kernels can still be checked. Half-precision arithmetic is done in float32 and rounded to each
node's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.graph import _reference_contract as contract
from torch_pruner.graph import _reference_pointwise as pointwise
from torch_pruner.graph import _reference_recurrence as recurrence
from torch_pruner.graph import nibbles
from torch_pruner.graph.ir import Graph, Node, const_value
from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Sequence


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of an IR dtype name; bfloat16 comes from ``ml_dtypes``."""
    if name == "bfloat16":
        import ml_dtypes

        found: np.dtype = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(name)


def evaluate(graph: Graph, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of ``graph`` for ``inputs`` in index order.

    A value is kept until its last reader has run: parameters of a whole network pass through here.

    Raises ``ValueError`` if an input has not the shape and dtype that its node declares.
    """
    values: dict[int, np.ndarray] = {}
    last = {i: k for k, node in enumerate(graph.nodes) for i in node.inputs}
    last |= dict.fromkeys(graph.outputs, len(graph.nodes))
    with np.errstate(all="ignore"):
        for k, node in enumerate(graph.nodes):
            result = _evaluate(node, [values[i] for i in node.inputs], inputs)
            if result.shape != node.shape:
                raise ValueError(f"{node.op}: computed shape {result.shape}, declared {node.shape}")
            if k in last:
                values[k] = result
            for i in {i for i in node.inputs if last[i] == k}:
                del values[i]
    return [values[i] for i in graph.outputs]


def _evaluate(node: Node, args: list[np.ndarray], inputs: Sequence[np.ndarray]) -> np.ndarray:
    dtype = numpy_dtype(node.dtype)
    match node.kind:
        case OpKind.LEAF:
            return _leaf(node, inputs, dtype)
        case OpKind.POINTWISE if node.op == "within":
            return _within(node, *args)
        case OpKind.POINTWISE:
            result = pointwise.apply(node.op, [widen(a) for a in args])
            return np.broadcast_to(pointwise.convert(result, dtype), node.shape)
        case OpKind.VIEW:
            return _view(node, args[0])
        case OpKind.INJECTIVE:
            return _injective(node, args, dtype)
        case OpKind.REDUCE:
            return pointwise.convert(_reduce(node, widen(args[0])), dtype)
        case OpKind.WINDOW:
            return pointwise.convert(contract.window(node, widen(args[0])), dtype)
        case OpKind.PREPARED:
            return pointwise.convert(_prepared(node, args), dtype)
        case OpKind.CONTRACT if node.op == "matmul_grouped":
            depth = args[0].shape[-1]
            return pointwise.convert(
                np.matmul(widen(args[0]), _group_floats(node, args[1:], depth)), dtype
            )
        case OpKind.CONTRACT:
            # Bytes times bytes are summed in the wider integers of the result.
            wide = [a.astype(dtype) if dtype.kind in "iu" else widen(a) for a in args]
            result = contract.contract(node, *wide)
            return pointwise.convert(result, dtype)
        case OpKind.RECURRENCE:
            return pointwise.convert(recurrence.states(node, *args), dtype)
        case OpKind.GROUPED:
            return pointwise.convert(_grouped(*args), dtype)
        case OpKind.UPDATE:
            x, rows, *index = args
            updated = x.copy()
            places = (*(slice(None),) * node.attr("dim"), *index)
            if node.op == "accumulate":
                return _accumulated(updated, places, rows)
            updated[places] = rows
            return updated
    raise AssertionError(node.op)


def _grouped(x: np.ndarray, matrices: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Rows in groups, each times the matrix of its group."""
    rows, wide = widen(x), widen(matrices)
    result = np.zeros((len(rows), wide.shape[2]), rows.dtype)
    begin = 0
    for end, matrix in zip(np.clip(ends, 0, len(rows)), wide, strict=True):
        result[begin:end] = rows[begin:end] @ matrix
        begin = int(end)
    return result


def _accumulated(
    x: np.ndarray, places: tuple[slice | np.ndarray, ...], rows: np.ndarray
) -> np.ndarray:
    """``x`` with ``rows`` added at their places, each sum rounded once."""
    wide = widen(x)
    np.add.at(wide, places, widen(rows))  # type: ignore[arg-type]  # as indexing takes it
    return pointwise.convert(wide, x.dtype)


def _within(node: Node, x: np.ndarray, count: np.ndarray) -> np.ndarray:
    """What does not count is NaN here, or zero: nobody may depend on it."""
    places = np.arange(node.numel).reshape(node.shape) // node.attr("stride")
    counts = places % node.attr("extent") < count + dict(node.attrs).get("more", 0)
    other = 0 if x.dtype.kind in "iub" else np.nan
    return np.where(counts, x, np.asarray(other).astype(x.dtype))


def widen(x: np.ndarray) -> np.ndarray:
    """Half-precision arrays as float32; others as they are."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iu" else x


def _leaf(node: Node, inputs: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    if node.op == "const":
        return np.asarray(const_value(node)).astype(dtype)
    if node.op == "iota":
        dim = node.attr("dim")
        line = np.arange(node.shape[dim]).astype(dtype)
        shape = [-1 if i == dim else 1 for i in range(len(node.shape))]
        return np.broadcast_to(line.reshape(shape), node.shape)
    value = np.asarray(inputs[node.attr("index")])
    if value.shape != node.shape or value.dtype != dtype:
        raise ValueError(
            f"input {node.attr('index')} is {value.dtype}{list(value.shape)}, "
            f"the graph declares {node.dtype}{list(node.shape)}"
        )
    return value


def _view(node: Node, x: np.ndarray) -> np.ndarray:
    match node.op:
        case "reshape":
            return np.ascontiguousarray(x).reshape(node.shape)
        case "permute":
            return x.transpose(node.attr("perm"))
        case "broadcast":
            return np.broadcast_to(x, node.shape)
        case "flip":
            return np.flip(x, node.attr("dims"))
    window = tuple(
        slice(start, start + (size - 1) * step + 1 if size else start, step)
        for start, step, size in zip(
            node.attr("starts"), node.attr("steps"), node.shape, strict=True
        )
    )
    return x[window]


def _injective(node: Node, args: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    match node.op:
        case "pad":
            value = node.attr("value")
            widths = list(zip(node.attr("lo"), node.attr("hi"), strict=True))
            fill = np.asarray(float(value) if isinstance(value, str) else value).astype(dtype)
            out = np.full(node.shape, fill, dtype)
            inner = tuple(
                slice(lo, lo + n) for (lo, _), n in zip(widths, args[0].shape, strict=True)
            )
            out[inner] = args[0]
            return out
        case "cat":
            return np.concatenate(args, axis=node.attr("dim")).astype(dtype)
        case "take":
            return np.take(args[0], args[1], axis=node.attr("dim"))
    x, index = args
    dim = node.attr("dim")
    cut = tuple(slice(None) if i == dim else slice(0, size) for i, size in enumerate(index.shape))
    return np.take_along_axis(x[cut], index, axis=dim)


def _prepared(node: Node, args: Sequence[np.ndarray]) -> np.ndarray:
    match node.op:
        case "group_scales":
            return nibbles.scales_of(args[0], node.attr("group"))
        case "group_words":
            return nibbles.words_of(args[0], args[1], node.attr("group"))
        case "byte_words":
            return nibbles.packed(args[0], 8)
        case "torch_words":
            return nibbles.packed(nibbles.from_torch(args[0], node.attr("block")))
        case "plane":
            return args[0][..., node.attr("at")]
    return _group_floats(node, args, node.shape[0])


def _group_floats(node: Node, args: Sequence[np.ndarray], depth: int) -> np.ndarray:
    """What words, scales and perhaps offsets stand for, float32."""
    words, scales, *offsets = args
    offset = offsets[0] if offsets else None
    group, bits = node.attr("group"), node.attr("bits")
    return nibbles.weights_of(words, scales, offset, depth, group, bits)


def _reduce(node: Node, x: np.ndarray) -> np.ndarray:
    axes = node.attr("axes")
    match node.op:
        case "sum" | "prod":
            wide = numpy_dtype(node.dtype)
            if wide.kind not in "iub" or node.dtype == "bfloat16":
                wide = np.dtype(np.float64)
            reducer = np.sum if node.op == "sum" else np.prod
            return np.asarray(reducer(x, axis=axes, dtype=wide))
        case "max" | "min":
            return np.asarray((np.max if node.op == "max" else np.min)(x, axis=axes))
        case "any" | "all":
            return np.asarray((np.any if node.op == "any" else np.all)(x, axis=axes))
    (axis,) = axes
    return np.asarray((np.argmax if node.op == "argmax" else np.argmin)(x, axis=axis))
