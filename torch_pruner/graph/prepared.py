"""Operators that are computed ahead, as ordinary ones: for parameters that count as changing.

Under ``weights="live"``, or where a graph is trained, words of weights are inputs like any other,
and are taken apart at every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.nibbles import WORD, per_word
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.quantize import static_nodes

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Node


def ordinary(graph: Graph) -> Graph:
    """``graph`` whose prepared operators depend on parameters alone; others are written out."""
    static = static_nodes(graph)
    if all(n.kind is not OpKind.PREPARED or i in static for i, n in enumerate(graph.nodes)):
        return graph
    b = GraphBuilder()
    new: list[int] = []
    for i, node in enumerate(graph.nodes):
        inputs = tuple(new[j] for j in node.inputs)
        if node.kind is OpKind.PREPARED and i not in static:
            new.append(_written_out(b, node, inputs))
        else:
            new.append(b.again(node, inputs))
    return b.finish([new[o] for o in graph.outputs])


def _written_out(b: GraphBuilder, node: Node, inputs: tuple[int, ...]) -> int:
    match node.op:
        case "plane":
            starts = (*(0 for _ in node.shape), node.attr("at"))
            return b.reshape(b.slice(inputs[0], starts, (*node.shape, 1)), node.shape)
        case "byte_words":
            return _words(b, inputs[0], 8)
        case "torch_words":
            return _words(b, _from_torch(b, inputs[0], node.attr("block")), 4)
        case "group_floats":
            return _floats(b, node, inputs)
    raise AssertionError(f"{node.op} of what is no parameter")


def _positions(b: GraphBuilder, shape: tuple[int, ...], bits: int) -> int:
    """The lowest bit of each number of a word: (words, number, column)."""
    iota = b.append("iota", (), shape, "int32", dim=1)
    return b.pointwise("mul", iota, b.const(bits, "int32"))


def _words(b: GraphBuilder, numbers: int, bits: int) -> int:
    """Numbers (k, n) as words."""
    depth, columns = b.shape(numbers)
    each = per_word(bits)
    rows = -(-depth // each)
    wide = b.cast(numbers, "int32")
    if rows * each > depth:
        hi = (rows * each - depth, 0)
        shape = (rows * each, columns)
        wide = b.append("pad", (wide,), shape, "int32", lo=(0, 0), hi=hi, value=0)
    lanes = b.reshape(wide, (rows, each, columns))
    low = b.pointwise("bitwise_and", lanes, b.const(2**bits - 1, "int32"))
    moved = b.pointwise("shift_left", low, _positions(b, b.shape(lanes), bits))
    return b.reduce("sum", moved, (1,), dtype="int32")  # no two have a bit in common


def _floats(b: GraphBuilder, node: Node, inputs: tuple[int, ...]) -> int:
    words, *factors = inputs
    depth, columns = node.shape
    bits, group = node.attr("bits"), node.attr("group")
    rows, shape = b.shape(words)[0], (b.shape(words)[0], per_word(bits), columns)
    spread = b.broadcast(b.reshape(words, (rows, 1, columns)), shape)
    highest = b.const(WORD - bits, "int32")
    up = b.pointwise("sub", highest, _positions(b, shape, bits))
    numbers = b.pointwise("shift_right", b.pointwise("shift_left", spread, up), highest)
    flat = b.slice(b.reshape(numbers, (rows * per_word(bits), columns)), (0, 0), node.shape)
    value = b.cast(flat, "float32")
    for op, factor in zip(("mul", "add"), factors, strict=False):
        groups = b.shape(factor)[0]
        wide = b.reshape(b.cast(factor, "float32"), (groups, 1, columns))
        every = b.reshape(b.broadcast(wide, (groups, group, columns)), (groups * group, columns))
        value = b.pointwise(op, value, b.slice(every, (0, 0), (depth, columns)))
    return b.cast(value, node.dtype)


def _from_torch(b: GraphBuilder, given: int, block: int) -> int:
    """See ``nibbles.from_torch``; (k, n) int32."""
    columns, half = b.shape(given)
    depth, whole = 2 * half, columns // block * block if block else 0
    parts = []

    def halves(first: int, count: int) -> tuple[int, int]:
        wide = b.cast(b.slice(given, (first, 0), (count, half)), "int32")
        low = b.pointwise("bitwise_and", wide, b.const(15, "int32"))
        return low, b.pointwise("shift_right", wide, b.const(4, "int32"))

    if whole:
        shape = (whole // block, depth, block // 2)
        sides = [b.reshape(x, shape) for x in halves(0, whole)]
        rows = b.append("cat", sides, (*shape[:2], block), "int32", dim=2)
        parts.append(b.reshape(b.permute(rows, (1, 0, 2)), (depth, whole)))
    if whole < columns:
        rest = columns - whole
        sides = [b.reshape(x, (depth, rest // 2, 1)) for x in halves(whole, rest)]
        rows = b.append("cat", sides, (depth, rest // 2, 2), "int32", dim=2)
        parts.append(b.reshape(rows, (depth, rest)))
    numbers = parts[0]
    if len(parts) > 1:
        numbers = b.append("cat", parts, (depth, columns), "int32", dim=1)
    return b.pointwise("sub", numbers, b.const(8, "int32"))
