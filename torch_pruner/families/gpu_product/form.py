"""What a tiled product on a GPU takes: panels as wide as a block, sums of a split reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph


N = TypeVar("N")

FOURS = 4  # neighbours of 16 bytes together


class GpuProductDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    bm: N  # rows of a block's tile
    bn: N  # columns of a block's tile, and of a panel
    bk: N  # positions of the reduction in a turn
    tm: N  # rows of a thread; of a warp, in tensor cores
    tn: N  # columns of a thread; of a warp, in tensor cores
    stages: N  # turns whose tiles shared memory holds at once
    tensor: N  # 1: products in tensor cores
    ahead: N  # 1: copies are asynchronous where operands allow it, ``stages`` - 1 turns ahead
    split: N = 1  # type: ignore[assignment]  # blocks that share the turns of a tile; divides them


def in_fours(spec: Graph, decisions: GpuProductDecisions[int]) -> bool:
    """Whether a packed operand lies by ``FOURS``."""
    return bool(decisions.tensor) and spec.nodes[contraction_of(spec).b].dtype == "float32"


def parameters(spec: Graph, decisions: GpuProductDecisions[int]) -> Parameters:
    """Panels as wide as a block's columns; operands that change are read where they lie.

    In panels of float32 for tensor cores ``FOURS`` neighbours along the reduction lie together, as
    these read them. Scratch: what each part of a split reduction sums up.
    """
    packs: dict[int, PackLayout] = {}
    con = contraction_of(spec)
    if (constant := constant_operand(spec, con)) is not None:
        (index, view), block = constant, decisions.bn
        form = "matmul" if con.form == "conv_phases" else con.form
        along = FOURS if in_fours(spec, decisions) else 1
        deep = -(-con.depth // decisions.bk) * decisions.bk if along > 1 else con.depth
        shape = (con.groups, -(-con.n // block), deep // along, block * along)
        packs[index] = PackLayout(view, form, con.groups, block, shape, along)
    sums = BufferSpec((decisions.split, con.groups, con.rows, con.n), con.acc_dtype)
    return Parameters(packs, (sums,) if decisions.split > 1 else ())
