"""Cycles that packing the second operand takes at each call, as the draft model sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.adjacency import columns_adjacent, packs_in_squares

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph

COLUMN_CYCLES, ROW_CYCLES = 1.5, 0.4  # of an element, across memory and along it
SQUARE_CYCLES = 0.5  # of an element across memory, in squares that are turned in registers


def packed_cycles(spec: Graph, con: Contraction, lanes: int) -> float:
    """Cycles of an element that is packed."""
    if columns_adjacent(spec, con):
        return ROW_CYCLES
    return SQUARE_CYCLES if packs_in_squares(spec, con, lanes) else COLUMN_CYCLES
