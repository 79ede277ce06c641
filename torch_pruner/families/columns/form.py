"""Decisions of reductions over outer axes, and of windows, and which of these go along lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")

_FEWEST = 4  # outputs of a line that are worth vectors
_MOST = 16384  # elements of a line, and of what is computed for one


class ColumnsDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    chunk: N  # vectors of a parallel task
    par: N  # 1: tasks in parallel


def line_windows(spec: Graph) -> tuple[int, ...]:
    """Windows that move along the axis in which the outputs lie: neighbouring ones read what lies
    apart, and those at an end reach beyond it. A window, or a maximum and its position; empty: the
    kernel is of another kind, or its lines are too short or too long."""
    anchors = tuple(i for i, n in enumerate(spec.nodes) if n.kind in (OpKind.WINDOW, OpKind.REDUCE))
    nodes = [spec.nodes[i] for i in anchors]
    if not nodes or any(n.kind is not OpKind.WINDOW for n in nodes):
        return ()
    if len({(n.inputs, n.shape, n.attrs) for n in nodes}) > 1:
        return ()
    if len(nodes) > 1 and {n.op for n in nodes} != {"window_max", "window_argmax"}:
        return ()
    shape, width = nodes[0].shape, line_width(spec, anchors[0])
    if shape[-1] < _FEWEST or max(width, 3 * shape[-1]) > _MOST:
        return ()
    return anchors if _elementwise(spec, anchors) else ()


def line_width(spec: Graph, window: int) -> int:
    """Elements of the operand, with padding, over which windows move along the last axis."""
    node = spec.nodes[window]
    last = (node.shape[-1] - 1) * node.attr("stride")[-1]
    reach = last + (node.attr("kernel")[-1] - 1) * node.attr("dilation")[-1] + 1
    return int(max(reach, node.attr("lo")[-1] + spec.nodes[node.inputs[0]].shape[-1]))


def _elementwise(spec: Graph, anchors: tuple[int, ...]) -> bool:
    """Whether each element of the outputs is made of that of a window at the same place."""
    made, shape = set(anchors), spec.nodes[anchors[0]].shape
    for i, node in enumerate(spec.nodes):
        if not made.isdisjoint(node.inputs):
            if node.kind is not OpKind.POINTWISE or node.shape != shape:
                return False
            made.add(i)
    return made.issuperset(spec.outputs)
