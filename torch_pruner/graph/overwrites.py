"""Which results may be written over an input, element by element: an optimizer's step needs no copy
of what it renews.

Unlike an update (``graph/updates.py``) such a kernel cannot run twice, so a program has memory of
its own for these results too, and whoever calls it says when they may go where they belong.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch_pruner.graph.fuse import FusedGraph, Kernel
    from torch_pruner.graph.ir import Graph

_KINDS = frozenset((OpKind.LEAF, OpKind.POINTWISE, OpKind.VIEW))


def overwritable(fused: FusedGraph, one_pass: Collection[int]) -> tuple[tuple[int, int], ...]:
    """Pairs (output of the graph, index of an input): the kernel of the one may write over the
    other.

    It alone reads that input, each element where it writes it and before it does. ``one_pass``:
    the positions of kernels that compute every element of their results once.
    """
    graph = fused.graph
    readers = Counter(i for kernel in fused.kernels for i in set(kernel.inputs))
    results = Counter(graph.outputs)
    found = []
    for at in one_pass:
        kernel = fused.kernels[at]
        for out in kernel.outputs:
            if results[out] == 1:
                found += _of(fused, kernel, out, readers)
    return tuple(found)


def _of(
    fused: FusedGraph, kernel: Kernel, out: int, readers: Mapping[int, int]
) -> list[tuple[int, int]]:
    graph = fused.graph
    mine = [
        (position, node)
        for position, node in enumerate(kernel.inputs)
        if graph.nodes[node].op == "input"
        and readers[node] == 1
        and kernel.inputs.count(node) == 1
        and node not in graph.outputs
        and fused.orders[node] == fused.orders[out]
        and graph.nodes[node].shape == graph.nodes[out].shape
        and graph.nodes[node].dtype == graph.nodes[out].dtype
    ]
    return [
        (graph.outputs.index(out), int(graph.nodes[node].attr("index")))
        for position, node in mine
        if _reads_where_it_writes(kernel, position)
    ]


def _reads_where_it_writes(kernel: Kernel, position: int) -> bool:
    spec: Graph = kernel.spec
    source = spec.inputs[position]
    shape = spec.nodes[spec.outputs[0]].shape
    reached = {source}
    for i, node in enumerate(spec.nodes):
        if node.kind not in _KINDS:
            return False
        if any(j in reached for j in node.inputs):
            if node.kind is not OpKind.POINTWISE or node.shape != shape:
                return False
            reached.add(i)
    return spec.nodes[source].shape == shape
