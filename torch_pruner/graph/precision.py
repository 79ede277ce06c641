"""Where results may be less exact than float32's: because torch allows it, or ``fast_math`` does.

Marks are attributes of nodes, so they are part of a kernel's workload, of what a worker is sent and
of nothing else: a graph without marks is the graph that it was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner.graph.ir import Graph
from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch_pruner.graph.ir import Node

_ROUNDED = frozenset(("matmul", "conv", "conv_transpose"))
_APPROXIMATED = frozenset(("exp", "erf", "tanh", "sigmoid"))


def allow_tf32(graph: Graph, ops: Collection[str]) -> Graph:
    """Marks contractions of float32 whose operator is among ``ops`` with the attribute ``tf32``.

    They may round their operands to ten bits of mantissa, as tensor cores do. Not those that have
    an operand made of constants alone: they stand for operators that torch computes in full.
    """
    return _marked(graph, "tf32", ops, ()) if ops else graph


def allow_fast(graph: Graph) -> Graph:
    """Marks what ``fast_math`` lets kernels compute less exactly with the attribute ``fast``.

    Contractions of float32, of which one operand may be bfloat16 (not those that ``allow_tf32``
    leaves alone): operands may be rounded to bfloat16, an error of 2**-9 of each, and minimal
    filtering may be larger. Elementary functions of float32: a cheaper approximation whose error is
    stated.
    """
    return _marked(graph, "fast", _ROUNDED, _APPROXIMATED)


def is_tf32(node: Node) -> bool:
    """Whether a contraction was marked."""
    return ("tf32", True) in node.attrs


def is_fast(node: Node) -> bool:
    """Whether ``allow_fast`` marked a node."""
    return ("fast", True) in node.attrs


def takes_bfloat16(graph: Graph, product: int) -> bool:
    """Whether the operands of a product are bfloat16, or may be rounded to it."""
    node = graph.nodes[product]
    dtypes = {graph.nodes[i].dtype for i in node.inputs}
    return dtypes == {"bfloat16"} or (is_fast(node) and dtypes <= {"bfloat16", "float32"})


def _marked(
    graph: Graph, mark: str, contractions: Collection[str], pointwise: Collection[str]
) -> Graph:
    given: list[bool] = []  # whether a node depends on an input
    nodes: list[Node] = []
    for node in graph.nodes:
        given.append(node.op == "input" or any(given[i] for i in node.inputs))
        operands = [nodes[i].dtype for i in node.inputs]
        product = node.kind is OpKind.CONTRACT and node.op in contractions
        wanted = product and all(given[i] for i in node.inputs)
        wanted = wanted or (node.op in pointwise and node.dtype == "float32")
        if product and mark == "fast" and node.dtype == "float32":
            operands = [dtype for dtype in operands if dtype != "bfloat16"] or ["bfloat16"]
        if wanted and all(dtype == "float32" for dtype in operands):
            node = replace(node, attrs=tuple(sorted((*node.attrs, (mark, True)))))
        nodes.append(node)
    return Graph(tuple(nodes), graph.outputs)
