"""Float32 parameters that hold nothing a narrower float could not: their products read that.

Most checkpoints were trained and published in bfloat16 and are loaded as float32: the low halves of
all their weights are zero. A narrower copy is then the same numbers in half of the bytes. Kernels
widen it in registers, which is exact, and multiply and add as they do for float32.

This depends on what a parameter holds, which a graph does not say. Whoever compiles looks
(``dynamo.run.narrow_weights``), and looks again whenever the parameter changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.ir import Graph, GraphBuilder, Node
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.simplify import simplify
from torch_pruner.graph.strided import axis_below

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch_pruner.graph.layout import Order

NARROWER = ("bfloat16", "float16")
"""What float32 may be narrowed to, first choice first."""
CODED = "coded"
"""What is bfloat16, and most of it has one of few exponents: twelve bits (``graph.coded``)."""
LEAST = 64
"""Columns and depth of a weight that is worth it."""
FEW_ROWS = 16
"""Products of more read the sixteen bits."""


def is_worth(shape: tuple[int, ...]) -> bool:
    """Whether a parameter of this shape may be the weight of a product that is worth it."""
    return len(shape) == 2 and min(shape) >= LEAST


def narrowed(graph: Graph, holds: Mapping[int, str]) -> tuple[Graph, dict[int, str]]:
    """``graph`` with narrower inputs where ``holds`` allows it, and which they are.

    ``holds`` gives, for the index of a static float32 input, the narrower dtype that represents
    each of its elements, or ``CODED``. Such an input gets this dtype if products read it as their
    second operand and nothing else does, but the rows that an embedding takes of it. All other
    values keep theirs. What is ``CODED`` is bfloat16, and the input of products of few rows says
    so, whose kernels may have it coded.
    """
    small = simplify(graph)
    users = small.users()
    most = {
        i: _most_rows(small, users, i)
        for i, node in enumerate(small.nodes)
        if node.op == "input" and _allowed(node, holds)
    }
    found = {i: holds[small.nodes[i].attr("index")] for i, rows in most.items() if rows}
    if not found:
        return graph, {}
    b = GraphBuilder()
    new: list[int] = []
    few = {i for i, held in found.items() if held == CODED and most[i] <= FEW_ROWS}
    found = {i: "bfloat16" if held == CODED else held for i, held in found.items()}
    narrow = dict(found)  # of nodes of the old graph
    for i, node in enumerate(small.nodes):
        if i in few:
            index = node.attr("index")
            new.append(b.input(index, node.shape, narrow[i], static=True, coded=True))
            continue
        source = node.inputs[0] if node.inputs else None
        if node.kind is OpKind.VIEW and source in narrow:
            narrow[i] = narrow[source]
        dtype = narrow.get(i, node.dtype)
        inputs = [new[j] for j in node.inputs]
        if node.op == "take" and source in narrow:
            taken = b.append("take", inputs, node.shape, narrow[source], **dict(node.attrs))
            new.append(b.cast(taken, node.dtype))
        else:
            new.append(b.append(node.op, inputs, node.shape, dtype, **dict(node.attrs)))
    result = b.finish([new[o] for o in small.outputs])
    return result, {small.nodes[i].attr("index"): dtype for i, dtype in found.items()}


def orders_of_copies(graph: Graph, narrow: Collection[int], orders: Sequence[Order]) -> list[Order]:
    """Memory orders of the inputs of ``graph``, of which those of indices ``narrow`` are copies.

    ``orders`` are those of the tensors themselves. A copy lies as products of few rows read it
    fastest and in fewest bytes, along the reduction: where the columns of the weight are neighbours
    (``Conv1D``), and only such products read it, it is turned.
    """
    small = simplify(graph)
    users, found = small.users(), list(orders)
    for i in small.inputs:
        index = small.nodes[i].attr("index")
        if index in narrow and _is_read_across(small, users, i, orders[index][-1]):
            found[index] = tuple(reversed(orders[index]))
    return found


def _is_read_across(graph: Graph, users: list[list[int]], start: int, innermost: int) -> bool:
    """Whether columns of all products that read an input are neighbours, and their rows are few.

    ``innermost``: the axis of the input along which neighbours lie.
    """
    stack = [start]
    while stack:
        x = stack.pop()
        for u in users[x]:
            node = graph.nodes[u]
            if node.kind is OpKind.VIEW:
                stack.append(u)
                continue
            few = node.op == "matmul" and node.numel // node.shape[-1] <= FEW_ROWS
            if not few or _axis_of_input(graph, x, -1) != innermost:
                return False
    return True


def _axis_of_input(graph: Graph, at: int, axis: int) -> int | None:
    """The axis of the input that a node is views of, for one of its own; None: it has none."""
    found: int | None = axis % len(graph.nodes[at].shape)
    while found is not None and graph.nodes[at].op != "input":
        node = graph.nodes[at]
        at = node.inputs[0]
        found = axis_below(node, found, graph.nodes[at].shape)
    return found


def _allowed(node: Node, holds: Mapping[int, str]) -> bool:
    known = node.attr("index") in holds and bool(node.attr("static"))
    return known and node.dtype == "float32" and is_worth(node.shape)


def _most_rows(graph: Graph, users: list[list[int]], start: int) -> int:
    """Rows of the largest product that reads ``start`` through views, worth it; else 0.

    It is 0, too, if anything else reads it. Products have it as their second operand alone; rows of
    the input itself may be taken.
    """
    most, stack = 0, [start]
    while stack:
        x = stack.pop()
        if x in graph.outputs:
            return 0
        for u in users[x]:
            node = graph.nodes[u]
            if node.kind is OpKind.VIEW and node.op != "broadcast":
                stack.append(u)
            elif node.op == "matmul" and node.dtype == "float32":
                if node.inputs[1] != x or node.inputs[0] == x:
                    return 0
                if graph.nodes[node.inputs[0]].dtype == "float32":
                    most = max(most, node.numel // node.shape[-1])
            elif node.op != "take" or node.inputs[0] != x or node.inputs[1] == x:
                return 0
    return most
