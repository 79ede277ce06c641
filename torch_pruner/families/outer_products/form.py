"""Sums of outer products: both operands are packed, the first one in tiles of rows.

A gradient of a weight sums over the batch: at each position of the reduction both operands have
what belongs together side by side, and the next position lies a whole row further on, often a page
or more. A register tile takes a few numbers of the first operand at each; read in place they are
a cache line and a page for every step. Packed ``[group][tile][k][row of the tile]`` they are one
stream, as the second operand's panels are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.families.contraction.form import sums_between
from torch_pruner.graph.adjacency import rows_adjacent
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.ops import FLOATS
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")


class OuterProductsDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    tm: N  # rows of a register tile
    nv: N  # vectors of a row of a register tile
    mc: N  # chunks of rows
    order: N  # order of parallel tasks: 0 panels outside, 1 chunks outside
    ku: N  # unrolled positions of the reduction
    par: N  # 1: tasks in parallel
    kb: N  # blocks of the reduction; all tiles of a chunk pass by one before the next


def is_outer(spec: Graph) -> bool:
    """Whether a product is of this form, with nothing that is packed ahead of the call."""
    con = contraction_of(spec)
    if con.form != "matmul" or con.acc_dtype not in FLOATS or con.depth == 1:
        return False
    return rows_adjacent(spec, con) and constant_operand(spec, con) is None


def parameters(spec: Graph, decisions: OuterProductsDecisions[int]) -> Parameters:
    """Scratch in order: both packed operands, sums between blocks of the reduction."""
    con = contraction_of(spec)
    block = decisions.vl * decisions.nv
    blocks, tiles = -(-con.n // block), int(con.row_tiles(decisions.tm))
    scratch = [
        BufferSpec((con.groups, tiles, con.depth, decisions.tm), con.acc_dtype),
        BufferSpec((con.groups, blocks, con.depth, block), con.acc_dtype),
    ]
    if decisions.kb > 1:
        scratch.append(sums_between(con, decisions))
    return Parameters(scratch=tuple(scratch))
