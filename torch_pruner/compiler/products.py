"""Products of a graph split and joined where its cuts say so, and where that could be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.cuts import JOINED, SPLIT, Site, of_kind
from torch_pruner.graph.side_by_side import joinable, side_by_side
from torch_pruner.graph.taken_apart import separable, taken_apart

if TYPE_CHECKING:
    from torch_pruner.graph.cuts import Cuts
    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec


def with_products(graph: Graph, cuts: Cuts, target: TargetSpec) -> tuple[list[Site], Graph]:
    """``graph`` with products split and joined as ``cuts`` say; the sites of these kinds.

    Cards have calls of one kernel in one launch (``graph.neighbours``).
    """
    if target.card:
        return [], graph
    sites = [Site(SPLIT, product) for product in separable(graph)]
    graph = taken_apart(graph, of_kind(cuts, SPLIT))
    sites += [Site(JOINED, products[0]) for products in joinable(graph)]
    return sites, side_by_side(graph, of_kind(cuts, JOINED))
