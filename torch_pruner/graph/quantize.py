"""Products with weights of eight bits: read as they lie, scaled after the sum.

``quantize_weights`` makes such weights of floats, which the user has to ask for. ``keep_int8``
takes them however they came into the graph: without it their conversion to floats, which depends on
parameters alone, would be done ahead and four times the bytes be read at every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.contraction import accumulator
from torch_pruner.graph.ir import Graph, GraphBuilder, Node
from torch_pruner.graph.ops import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable

    # In the new graph: (builder, node, its operands there) -> what replaces the second operand, or
    # the node. None: nothing does.
    Rewrite = Callable[[GraphBuilder, Node, tuple[int, int]], int | None]

LEVELS = 127  # symmetric: -128 is not used
LEAST = 64  # columns and depth of a weight that is worth it
FEW_ROWS = 16


def quantize_weights(graph: Graph) -> Graph:
    """Static float weights of matrix products as int8, with one scale for every output channel.

    Symmetric, to the nearest of 255 levels: ``scale = max|w| / 127`` over the reduction, and the
    product is with ``int8 * scale``. Weights of fewer than 64 columns or rows stay. A channel with
    NaN or infinity is NaN.
    """

    def rewrite(b: GraphBuilder, node: Node, operands: tuple[int, int]) -> int | None:
        perm, weight = unpermuted(b, operands[1])
        of = b.nodes[weight]
        parameter = of.op == "input" and of.attr("static") and of.dtype in FLOATS
        if not parameter or len(of.shape) != 2 or min(of.shape) < LEAST:
            return None
        right = b.permute(b.cast(_rounded(b, weight, axis=perm[0]), of.dtype), perm)
        return b.append(node.op, (operands[0], right), node.shape, node.dtype)

    return rewritten(graph, rewrite)


def takes_bytes(rows: int, given: str, result: str) -> bool:
    """Whether a product of so many rows reads int8 weights as they are, on CPUs; ``given`` and
    ``result`` are the dtypes of its first operand, and of what it gives.

    bfloat16 has instructions for pairs, which want both operands in it: with few rows reading half
    of the bytes is worth more.
    """
    return result == "float32" or rows <= FEW_ROWS


def keep_int8(graph: Graph, takes: Callable[[int, str, str], bool] = takes_bytes) -> Graph:
    """``a @ (q * scale)`` as ``(a @ q) * scale`` for static int8 ``q`` of two dimensions.

    Where ``takes`` says so of the product's rows and dtypes. The scale, if there is one, is
    constant along the reduction. Sums are float32 and rounded to the product's dtype after scaling:
    the result is at least as exact as the original.
    """
    if all(node.dtype != "int8" for node in graph.nodes):
        return graph

    def rewrite(b: GraphBuilder, node: Node, operands: tuple[int, int]) -> int | None:
        if not takes(node.shape[0], b.dtype(operands[0]), node.dtype):
            return None
        found = _dequantized(b, operands[1])
        if found is None:
            return None
        values, scale = found
        total = b.append("matmul", (operands[0], values), node.shape, "float32")
        if scale is not None:
            total = b.pointwise("mul", total, b.cast(scale, "float32"), dtype="float32")
        return b.cast(total, node.dtype)

    return rewritten(graph, rewrite)


def rewritten(graph: Graph, rewrite: Rewrite) -> Graph:
    """The graph with ``rewrite`` applied to products of a changing and a static matrix."""
    static = static_nodes(graph)
    b = GraphBuilder()
    new: list[int] = []
    for node in graph.nodes:
        inputs = tuple(new[i] for i in node.inputs)
        found = None
        if node.op == "matmul" and len(node.shape) == 2 and accumulator(node.dtype) == "float32":
            left, right = node.inputs
            if left not in static and right in static:
                found = rewrite(b, node, (inputs[0], inputs[1]))
        if found is None:
            found = b.again(node, inputs)
        new.append(found)
    return b.finish([new[o] for o in graph.outputs])


def static_nodes(graph: Graph) -> set[int]:
    """Nodes that depend on parameters and constants alone."""
    found: set[int] = set()
    for i, node in enumerate(graph.nodes):
        if node.op == "input":
            if node.attr("static"):
                found.add(i)
        elif all(j in found for j in node.inputs):
            found.add(i)
    return found


def unpermuted(b: GraphBuilder, x: int) -> tuple[tuple[int, ...], int]:
    """(order of the axes, what is permuted): of a matrix."""
    node = b.nodes[x]
    return (node.attr("perm"), node.inputs[0]) if node.op == "permute" else ((0, 1), x)


def _rounded(b: GraphBuilder, weight: int, axis: int) -> int:
    """A weight rounded to int8 times a scale that is constant along ``axis``; float32."""
    wide = b.cast(weight, "float32")
    largest = b.reduce("max", b.pointwise("abs", wide), (axis,), keepdim=True)
    step = b.pointwise("div", largest, b.const(float(LEVELS), "float32"))
    one, zero = b.const(1.0, "float32"), b.const(0.0, "float32")
    divisor = b.pointwise("where", b.pointwise("eq", step, zero), one, step)
    levels = b.pointwise("round", b.pointwise("div", wide, divisor))
    values = b.append("cast", (levels,), b.shape(wide), "int8")
    return b.pointwise("mul", b.cast(values, "float32"), step)


def _dequantized(b: GraphBuilder, right: int) -> tuple[int, int | None] | None:
    """(int8 values (k, n), their scale (n,) or () or None) that an operand (k, n) is made of."""
    perm, x = unpermuted(b, right)
    if b.nodes[x].op == "cast" and b.dtype(b.nodes[x].inputs[0]) in FLOATS:
        x = b.nodes[x].inputs[0]
    sides: tuple[int, ...] = b.nodes[x].inputs if b.nodes[x].op == "mul" else (x,)
    for values, factor in zip(sides, sides[::-1], strict=True):
        node = b.nodes[values]
        if node.op != "cast" or node.dtype not in FLOATS or b.dtype(node.inputs[0]) != "int8":
            continue
        whole = b.permute(node.inputs[0], perm)
        if len(sides) == 1:
            return whole, None
        if (scale := _by_column(b, factor, perm)) is not None:
            return whole, scale
    return None


def _by_column(b: GraphBuilder, factor: int, perm: tuple[int, ...]) -> int | None:
    """A factor of the weight as a vector over columns; None if it varies along the reduction."""
    if b.shape(factor) == ():
        return factor
    if b.nodes[factor].op != "broadcast":
        return None
    source = b.nodes[factor].inputs[0]
    shape = (1, 1, *b.shape(source))[-2:]
    return b.reshape(source, (shape[perm[1]],)) if shape[perm[0]] == 1 else None
