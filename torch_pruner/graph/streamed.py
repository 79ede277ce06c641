"""Which kernels read weights of which nothing is left in the caches when the next call comes.

A product of few rows uses every weight once in a call. Where a program's weights of such products
are more than the last cache holds, the next call finds none of them there: all that keeping them
does is to drive out what is read again, keys and values, and what Python and the framework have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.ops import ITEMSIZE, OpKind
from torch_pruner.graph.quantize import FEW_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.graph.fuse import FusedGraph
    from torch_pruner.graph.ir import Graph


def past_caches(fused: FusedGraph, workloads: Sequence[str], cache_bytes: int) -> frozenset[str]:
    """Of ``workloads``, which the kernels in order are, those with such weights.

    All products of few rows with constant weights, or none: ``cache_bytes`` are those of the last
    cache.
    """
    sizes: dict[int, int] = {}
    found = set()
    for kernel, workload in zip(fused.kernels, workloads, strict=True):
        index = _weight(kernel.spec)
        if index is not None:
            node = kernel.spec.nodes[kernel.spec.inputs[index]]
            sizes[kernel.inputs[index]] = node.numel * ITEMSIZE[node.dtype]
            found.add(workload)
    return frozenset(found) if sum(sizes.values()) > cache_bytes else frozenset()


def _weight(spec: Graph) -> int | None:
    """Which input of a kernel is the weight of a product of few rows."""
    if sum(node.kind is OpKind.CONTRACT for node in spec.nodes) != 1:
        return None
    product = contraction_of(spec)
    if product.rows > FEW_ROWS or (operand := constant_operand(spec, product)) is None:
        return None
    return operand[0]
