"""Operands that are widened before a product of few rows, as narrow caches: read as they lie."""

from __future__ import annotations

from torch_pruner.graph.ir import Graph, GraphBuilder, Node
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.quantize import FEW_ROWS, static_nodes
from torch_pruner.graph.strided import axis_below

NARROW = ("bfloat16", "float16")


def keep_narrow(graph: Graph) -> Graph:
    """Products of few rows with a changing operand that is widened for them, as a cache of keys.

    Kernels of few rows widen what they read, which is exact: without this a float32 copy of a
    bfloat16, float16 or int8 cache would be made at every step. The scale of int8 is constant along
    one of the operand's last two axes: it moves behind the sum, or to the other operand.
    """
    if not any(node.dtype in (*NARROW, "int8") for node in graph.nodes):
        return graph
    static = static_nodes(graph)
    b = GraphBuilder()
    new: list[int] = []
    for node in graph.nodes:
        inputs = [new[i] for i in node.inputs]
        few = node.op == "matmul" and node.dtype == "float32" and node.shape[-2] < FEW_ROWS
        if few and node.inputs[1] not in static:
            new.append(_with_narrow(b, node, inputs[0], inputs[1]))
        else:
            new.append(b.again(node, inputs))
    return b.finish([new[o] for o in graph.outputs])


def _with_narrow(b: GraphBuilder, node: Node, left: int, right: int) -> int:
    """A product whose second operand is read as it lies, where it was widened before."""
    views: list[int] = []
    at = right
    while b.nodes[at].kind is OpKind.VIEW:
        views.append(at)
        (at,) = b.nodes[at].inputs
    wide = b.nodes[at]
    if wide.op == "cast" and b.dtype(wide.inputs[0]) in NARROW:
        values = _seen_through(b, wide.inputs[0], views)
        return b.append("matmul", (left, values), node.shape, node.dtype)
    axis = _axis_of_last(b, right, views)
    for values, scale in (wide.inputs, wide.inputs[::-1]) if wide.op == "mul" and axis else ():
        if not (_is_int8(b, values) and _repeats_last(b, scale)):
            continue
        values = _seen_through(b, b.nodes[values].inputs[0], views)
        factor = _seen_through(b, scale, views)
        if axis == -2:  # the reduction
            total = b.append("matmul", (left, values), node.shape, node.dtype)
            return b.pointwise("mul", total, b.broadcast(_first(b, factor, -2), node.shape))
        rank = len(node.shape)
        turned = (*range(rank - 2), rank - 1, rank - 2)
        line = b.broadcast(b.permute(_first(b, factor, -1), turned), b.shape(left))
        left = b.pointwise("mul", left, line)
        return b.append("matmul", (left, values), node.shape, node.dtype)
    return b.append("matmul", (left, right), node.shape, node.dtype)


def _is_int8(b: GraphBuilder, x: int) -> bool:
    node = b.nodes[x]
    return node.op == "cast" and node.dtype == "float32" and b.dtype(node.inputs[0]) == "int8"


def _repeats_last(b: GraphBuilder, x: int) -> bool:
    node = b.nodes[x]
    return node.op == "broadcast" and b.shape(node.inputs[0])[-1:] == (1,)


def _axis_of_last(b: GraphBuilder, x: int, views: list[int]) -> int | None:
    """Which of the last two axes of ``x`` is the last one below its views."""
    for axis in (-2, -1):
        at: int | None = len(b.shape(x)) + axis
        for view in views:
            below = b.shape(b.nodes[view].inputs[0])
            at = None if at is None else axis_below(b.nodes[view], at, below)
        whole = b.shape(b.nodes[views[-1]].inputs[0]) if views else b.shape(x)
        if at == len(whole) - 1 and whole[-1] == b.shape(x)[axis]:
            return axis
    return None


def _seen_through(b: GraphBuilder, x: int, views: list[int]) -> int:
    """The same views, the outermost first, of another value of the same shape."""
    for view in reversed(views):
        node = b.nodes[view]
        x = b.append(node.op, (x,), node.shape, b.dtype(x), **dict(node.attrs))
    return x


def _first(b: GraphBuilder, x: int, axis: int) -> int:
    """The first element along an axis, which stays."""
    shape = list(b.shape(x))
    shape[axis] = 1
    return b.slice(x, (0,) * len(shape), shape)
