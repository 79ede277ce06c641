"""Products in bfloat16 tiles: decisions, panels, a copied operand, sums that leave registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.families.bf16_pairs import form as pairs
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")


class Bf16TilesDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    rt: N  # tiles of up to 16 rows that are computed together
    nv: N  # tiles of 16 columns that are computed together
    mc: N  # chunks of rows
    order: N  # order of units: 0 panels outside, 1 chunks outside
    ku: N  # unrolled steps of the reduction, of 32 elements each
    tasks: N  # parallel tasks at most, among which units are shared out
    ahead: N  # 1: the next panel of constants is fetched early
    way: N  # to the first operand: see ``bf16_pairs.form``


def parameters(spec: Graph, decisions: Bf16TilesDecisions[int]) -> Parameters:
    """Scratch in order: that of ``bf16_pairs``; the float32 sums that leave tile registers."""
    block = decisions.nv * pairs.COLUMNS
    found = pairs.parameters(spec, "bf16_tiles", block, decisions.way)
    rows = decisions.rt * pairs.pair_form(spec, "bf16_tiles", decisions.way).rows
    # A line of the cache for every row: stacks are not aligned so well.
    sums = BufferSpec((decisions.tasks, rows, block), "float32")
    return Parameters(found.packs, (*found.scratch, sums))
