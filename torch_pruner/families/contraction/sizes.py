"""A contraction at the sizes for which it is drafted, where its rows are counted at run time.

A program for every size has room for the largest. Sizes that come are smaller, and by how much
differs: what is best at one of them (chunks of rows that fit a cache) may be slow at another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner.graph.extents import axis_counts, bounded_axes, unneeded

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph

__all__ = ["at_half_size", "drafted_sizes"]

_LESS = 8  # times fewer rows, at the smaller one of two sizes


def drafted_sizes(spec: Graph, con: Contraction) -> tuple[Contraction, ...]:
    """``con`` at sizes of which none is more likely than another; alone, if all of it counts.

    Images are made with twice the room along each side: of them all are as large as half of that.
    """
    node, bounds = spec.nodes[con.anchor], unneeded(spec)[con.anchor]
    if con.form == "conv" or len(node.shape) - 2 not in bounded_axes(node.shape, bounds):
        return (at_half_size(spec, con),)
    return con, replace(con, m=(-(-con.rows // _LESS),))


def at_half_size(spec: Graph, con: Contraction) -> Contraction:
    """A convolution with half of the positions along every axis of which so many count as is known
    at run time: sizes that come are smaller than the largest."""
    if con.form != "conv":
        return con
    counted = axis_counts(spec.nodes[con.anchor].shape, unneeded(spec)[con.anchor])
    axes = (0, *range(2, 1 + len(con.m)))
    return replace(
        con, m=tuple(-(-n // 2) if a in counted else n for a, n in zip(axes, con.m, strict=True))
    )
