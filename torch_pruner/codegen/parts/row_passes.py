"""What emitters of row kernels share: which values a pass keeps, and where outputs lie."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.reader import Index, reshape_index
from torch_pruner.graph.rows import viewed

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.rows import RowDomain


def newly_kept(
    spec: Graph, domain: RowDomain, kept: Collection[int], ready: set[int], roots: Sequence[int]
) -> list[int]:
    """Kept values that a pass over ``roots`` is the first to compute; ``ready`` ones are there."""
    found: set[int] = set()
    stack = list(roots)
    while stack:
        i = stack.pop()
        if i in kept and i not in ready:
            found.add(i)
        if i not in domain.reductions and i not in ready:
            stack.extend(spec.nodes[i].inputs)
    return sorted(found)


def forward(spec: Graph, node: int, index: Index) -> Index:
    """Carry an index of what ``node`` is a bijective view of to ``node``."""
    for after in viewed(spec, node)[1]:
        n = spec.nodes[after]
        source = spec.nodes[n.inputs[0]].shape
        if n.op == "permute":
            index = tuple(index[p] for p in n.attr("perm"))
        else:
            index = reshape_index(index, source, n.shape)
    return index


def row_index(spec: Graph, node: int, domain: RowDomain, row: Index) -> Index:
    """Index of a per-row output, a view of a node whose dimensions are the kept ones and ones."""
    kept = tuple(domain.shape[a] for a in domain.kept)
    shape = spec.nodes[viewed(spec, node)[0]].shape
    if math.prod(shape) != math.prod(kept):
        raise ValueError("a row kernel's output holds neither one value per row nor whole rows")
    return forward(spec, node, reshape_index(row, kept, shape))
