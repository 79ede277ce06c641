"""Where the elements of a node lie in memory, when the node is only views of one input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.graph.ir import Graph, Node, Shape

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Strided:
    """Element ``i`` of a node is ``offset + sum(i * strides)`` of input ``source`` (a position)."""

    source: int
    offset: int
    strides: tuple[int, ...]


def strided(graph: Graph, at: int) -> Strided | None:
    """The node's place in an input, or None: it is computed, or no strides describe the view."""
    found = _partly(graph, at)
    if found is None:
        return None
    strides = tuple(s for s in found.strides if s is not None)
    whole = len(strides) == len(found.strides) and found.offset is not None
    return Strided(found.source, found.offset or 0, strides) if whole else None


def matrix_strides(graph: Graph, at: int) -> tuple[int, int] | None:
    """Strides of the last two axes of what is only views of an input, or None: there are none.

    Strides need not describe the axes before, as where heads and chunks of a sequence became one.
    """
    found = _partly(graph, at)
    if found is None or len(found.strides) < 2:
        return None
    rows, columns = found.strides[-2:]
    return None if rows is None or columns is None else (rows, columns)


@dataclass(frozen=True, slots=True)
class _Partly:
    """``Strided``, of which strides of some axes and the offset may not exist (None)."""

    source: int
    offset: int | None
    strides: tuple[int | None, ...]


def _partly(graph: Graph, at: int) -> _Partly | None:
    node = graph.nodes[at]
    if node.op == "input":
        return _Partly(at, 0, dense(node.shape))
    if node.kind is not OpKind.VIEW:
        return None
    inner = _partly(graph, node.inputs[0])
    return None if inner is None else _viewed(node, graph.nodes[node.inputs[0]].shape, inner)


def _viewed(node: Node, shape: Shape, inner: _Partly) -> _Partly | None:
    strides, offset = inner.strides, inner.offset
    if node.op == "permute":
        return _Partly(inner.source, offset, tuple(strides[p] for p in node.attr("perm")))
    if node.op == "broadcast":
        kept = tuple(0 if d == 1 else s for d, s in zip(shape, strides, strict=True))
        return _Partly(inner.source, offset, (0,) * (len(node.shape) - len(shape)) + kept)
    if node.op == "slice":
        stepped: list[int | None] = []
        for begin, step, stride in zip(
            node.attr("starts"), node.attr("steps"), strides, strict=True
        ):
            if stride is None:
                offset = offset if begin == 0 else None
            elif offset is not None:
                offset += begin * stride
            stepped.append(None if stride is None else step * stride)
        return _Partly(inner.source, offset, tuple(stepped))
    if node.op == "reshape":
        return _Partly(inner.source, offset, _reshaped(shape, strides, node.shape))
    return None


def dense(shape: Shape) -> tuple[int, ...]:
    """The strides of elements in row order."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _reshaped(shape: Shape, strides: Sequence[int | None], target: Shape) -> tuple[int | None, ...]:
    """Strides of ``target`` over the same elements; None for axes of which merged ones lie apart.

    The inner part of an axis lies as that does, whatever its outer part was merged with.
    """
    if 0 in shape:
        return dense(target)
    old = [(d, s) for d, s in zip(shape, strides, strict=True) if d != 1]
    new = [k for k, d in enumerate(target) if d != 1]
    result: list[int | None] = [0] * len(target)
    i = j = 0
    while i < len(old):
        i0, j0, a, b = i, j, old[i][0], target[new[j]]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * old[i][0], i + 1
            else:
                b, j = b * target[new[j]], j + 1
        below, reach = old[i - 1][1], 1  # how far the elements lie ``below`` apart
        for extent, stride in reversed(old[i0:i]):
            if stride is None or below is None or stride != below * reach:
                break
            reach *= extent
        covered = 1
        for k in reversed(new[j0:j]):
            covered *= target[k]
            alike = below is not None and reach % covered == 0  # wherever the outer axes are
            result[k] = below * (covered // target[k]) if alike and below is not None else None
    return tuple(result)


def only_viewed(graph: Graph, at: int) -> bool:
    """Whether a value is an input's elements in another order, or repeated."""
    while graph.nodes[at].kind is OpKind.VIEW:
        at = graph.nodes[at].inputs[0]
    return graph.nodes[at].op == "input"


def adjacent(graph: Graph, at: int, axis: int) -> bool:
    """Whether neighbours along an axis of a node lie next to each other in an input.

    The node is only views of it; strides need not describe the other axes.
    """
    node = graph.nodes[at]
    axis %= len(node.shape)
    if node.op == "input":
        return math.prod(node.shape[axis + 1 :]) == 1
    if node.kind is not OpKind.VIEW:
        return False
    source = graph.nodes[node.inputs[0]].shape
    found = axis_below(node, axis, source)
    return found is not None and adjacent(graph, node.inputs[0], found)


def axis_below(node: Node, axis: int, source: Shape) -> int | None:
    """The axis of a view's operand along which neighbours are those along ``axis`` of the view.

    None: there is none. ``source``: the operand's shape.
    """
    if node.op == "permute":
        return int(node.attr("perm")[axis])
    if node.op == "slice":
        return axis if node.attr("steps")[axis] == 1 else None
    if node.op == "flip":
        return None if axis in node.attr("dims") else axis
    if node.op == "broadcast":
        below = axis - (len(node.shape) - len(source))
        return below if below >= 0 and source[below] == node.shape[axis] else None
    if node.op == "reshape":  # the axis is the inner part of one of the operand's, or all of it
        inner, extent = math.prod(node.shape[axis + 1 :]), node.shape[axis]
        for k, size in enumerate(source):
            if math.prod(source[k + 1 :]) == inner and size >= extent and size % extent == 0:
                return k
    return None


def offsets(graph: Graph, at: int, index: Sequence[Array]) -> Array:
    """Where elements of a node lie in the input that it is views of, as offsets.

    ``index`` has one array of positions per axis of the node.
    """
    node = graph.nodes[at]
    if node.op == "input":
        return np.ravel_multi_index(tuple(index), node.shape) if node.shape else np.array(0)
    assert node.kind is OpKind.VIEW, "no view of an input"
    return offsets(graph, node.inputs[0], _index_below(graph, node, index))


def _index_below(graph: Graph, node: Node, index: Sequence[Array]) -> list[Array]:
    """Where elements of a view lie in what it is a view of."""
    source = graph.nodes[node.inputs[0]].shape
    below = list(index)
    if node.op == "permute":
        for k, p in enumerate(node.attr("perm")):
            below[p] = index[k]
    elif node.op == "broadcast":
        tail = index[len(index) - len(source) :]
        below = [e * (d != 1) for e, d in zip(tail, source, strict=True)]
    elif node.op == "slice":
        cut = zip(index, node.attr("starts"), node.attr("steps"), strict=True)
        below = [e * h + s for e, s, h in cut]
    elif node.op == "flip":
        dims = node.attr("dims")
        below = [source[k] - 1 - e if k in dims else e for k, e in enumerate(index)]
    else:
        flat = np.ravel_multi_index(tuple(index), node.shape)
        below = list(np.unravel_index(flat, source))
    return below


class Step(Enum):
    """How what neighbours read lies in an input."""

    ONE = "one"  # they read one element
    NEXT = "next"  # neighbours
    APART = "apart"


def steps(graph: Graph, start: int, index: Sequence[Array]) -> dict[tuple[int, bytes], Step]:
    """How elements of a node at ``index`` read inputs: by each way through views, padding and
    pointwise operators. What ways lead through otherwise is not looked at.

    ``index`` has an array of positions, all as long, for each axis of the node.
    """
    found: dict[tuple[int, bytes], Step] = {}
    ways, seen = [(start, list(index))], set[tuple[int, bytes]]()
    while ways:
        at, index = ways.pop()
        node = graph.nodes[at]
        key = at, np.stack(np.broadcast_arrays(*index)).tobytes() if index else b""
        if key in seen:
            continue
        seen.add(key)
        if node.op == "input":
            found[key] = _step(node.shape, index)
        elif node.kind is OpKind.VIEW:
            ways.append((node.inputs[0], _index_below(graph, node, index)))
        elif node.kind is OpKind.POINTWISE:
            ways += [(i, index) for i in node.inputs if graph.nodes[i].shape == node.shape]
        elif node.op == "pad":
            inside = graph.nodes[node.inputs[0]].shape
            if 0 in inside:
                continue
            moved = zip(index, node.attr("lo"), inside, strict=True)
            ways.append((node.inputs[0], [np.clip(e - lo, 0, d - 1) for e, lo, d in moved]))
    return found


def _step(shape: Shape, index: Sequence[Array]) -> Step:
    if not shape:
        return Step.ONE
    apart = np.diff(np.atleast_1d(np.ravel_multi_index(tuple(index), shape)))
    if (apart == 0).all():  # every lane may read one place, by an index without lanes
        return Step.ONE
    return Step.NEXT if (apart == 1).all() else Step.APART


def reads_apart(graph: Graph, lanes: int) -> int:
    """How many reads of an elementwise graph's first output, of those that neighbours make, are not
    of neighbours in an input, nor of one element.

    Of ``lanes`` neighbours in the middle of the output, by the ways of ``steps``.
    """
    shape = graph.nodes[graph.outputs[0]].shape
    total = math.prod(shape)
    if not shape or total < lanes:
        return 0
    line = shape[-1]
    first = total // 2 // line * line  # where a line begins
    flat = np.minimum(first + np.arange(min(lanes, line)), total - 1)
    found = steps(graph, graph.outputs[0], np.unravel_index(flat, shape))
    return sum(step is Step.APART for step in found.values())


def reach(graph: Graph, at: int, axis: int, most: int) -> int:
    """How many neighbours along an axis of a node, up to ``most``, one instruction may move.

    They lie together, in groups that are aligned. 0: neighbours are apart, or the node is more than
    views of an input.
    """
    place = strided(graph, at)
    if place is None or place.strides[axis] != 1:
        return 0
    others = [s for k, s in enumerate(place.strides) if k != axis % len(place.strides)]
    return common_width(most, *others, place.offset)


def common_width(most: int, *axes: int) -> int:
    """Neighbours that one copy takes: as many, up to ``most``, as divide all of ``axes``."""
    width = most
    while any(axis % width for axis in axes):
        width //= 2
    return max(width, 1)
