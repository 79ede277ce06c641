"""Updates in place: which results lie in an input's memory, and what lay there before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.ir import GraphBuilder

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Node

__all__ = ["before_updates", "writes_in_place", "written_inputs"]


def writes_in_place(node: Node) -> bool:
    """Whether the result of ``node`` takes the memory of its first operand."""
    return node.op == "update" and bool(node.attr("in_place"))


def written_inputs(graph: Graph) -> dict[int, int]:
    """By output of ``graph``, the index of the input that it is, written into."""
    found = {}
    for k, position in enumerate(graph.outputs):
        node = graph.nodes[position]
        if writes_in_place(node):
            source = graph.nodes[node.inputs[0]]
            assert source.op == "input", "only inputs are written into"
            found[k] = int(source.attr("index"))
    return found


def before_updates(graph: Graph) -> Graph | None:
    """What the outputs of a kernel's graph hold before it runs; None if that does not matter."""
    if not any(writes_in_place(node) for node in graph.nodes):
        return None
    builder = GraphBuilder()
    new: list[int] = []
    for node in graph.nodes:
        operands = [new[i] for i in node.inputs]
        if writes_in_place(node):
            new.append(operands[0])
        else:
            attrs = dict(node.attrs)
            new.append(builder.append(node.op, operands, node.shape, node.dtype, **attrs))
    return builder.finish([new[o] for o in graph.outputs])
