"""Reductions to fewer numbers than there are threads, in parts that threads share.

A row kernel gives each row to one thread. The mean of a loss or the norm of a matrix has one row:
its parts become rows of their own, and what they give is reduced once more.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Node

LONG: Final = 1 << 15  # elements of a row: below, one thread is done before others have begun
MOST_PARTS: Final = 64
_ASSOCIATIVE: Final = frozenset(("sum", "prod", "max", "min", "any", "all"))
_HALF: Final = frozenset(("float16", "bfloat16"))


def in_parts(graph: Graph, threads: int) -> Graph:
    """``graph`` whose long reductions to fewer than ``threads`` numbers have two steps."""
    parts = {i: _parts(graph, node, threads) for i, node in enumerate(graph.nodes)}
    if not any(parts.values()):
        return graph
    b = GraphBuilder()
    new: list[int] = []
    for i, node in enumerate(graph.nodes):
        inputs = tuple(new[j] for j in node.inputs)
        found = parts[i]
        made = None if found is None else _two_steps(b, node, inputs[0], *found)
        new.append(b.again(node, inputs) if made is None else made)
    return b.finish([new[o] for o in graph.outputs])


def _parts(graph: Graph, node: Node, threads: int) -> tuple[int, int] | None:
    """(axis, parts of it) of a reduction that is divided: its outermost axis that has any."""
    if node.kind is not OpKind.REDUCE or node.op not in _ASSOCIATIVE or node.numel >= threads:
        return None
    shape = graph.nodes[node.inputs[0]].shape
    if math.prod(shape) < LONG * node.numel or not node.numel:
        return None
    for axis in node.attr("axes"):
        most = min(MOST_PARTS, shape[axis])
        count = next((n for n in range(most, threads - 1, -1) if shape[axis] % n == 0), 0)
        if count > 1:
            return axis, count
    return None


def _two_steps(b: GraphBuilder, node: Node, x: int, axis: int, parts: int) -> int:
    shape = b.shape(x)
    apart = b.reshape(x, (*shape[:axis], parts, shape[axis] // parts, *shape[axis + 1 :]))
    inner = [a + (a >= axis) for a in node.attr("axes")]
    dtype = "float32" if node.dtype in _HALF else node.dtype  # rounded once
    first = b.reduce(node.op, apart, inner, dtype=dtype)
    kept = [a for a in range(len(shape) + 1) if a not in inner]
    whole = b.reduce(node.op, first, [kept.index(axis)])
    return b.cast(whole, node.dtype) if dtype != node.dtype else whole
