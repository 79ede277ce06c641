"""Where float32 operands of products may be rounded to fewer bits, because torch allows it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner.graph.ir import Graph
from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch_pruner.graph.ir import Node


def allow_tf32(graph: Graph, ops: Collection[str]) -> Graph:
    """Marks contractions of float32 whose operator is among ``ops`` with the attribute ``tf32``.

    They may round their operands to ten bits of mantissa, as tensor cores do. Not those that have
    an operand made of constants alone: they stand for operators that torch computes in full.
    """
    if not ops:
        return graph
    given: list[bool] = []  # whether a node depends on an input
    nodes: list[Node] = []
    for node in graph.nodes:
        given.append(node.op == "input" or any(given[i] for i in node.inputs))
        wanted = node.kind is OpKind.CONTRACT and node.op in ops
        wanted = wanted and all(nodes[i].dtype == "float32" for i in node.inputs)
        if wanted and all(given[i] for i in node.inputs):
            node = replace(node, attrs=tuple(sorted((*node.attrs, ("tf32", True)))))
        nodes.append(node)
    return Graph(tuple(nodes), graph.outputs)


def is_tf32(node: Node) -> bool:
    """Whether a contraction was marked."""
    return ("tf32", True) in node.attrs
