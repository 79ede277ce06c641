"""What a product by warpgroups takes: panels in pieces of eight, sums of a split reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.codegen.parts.gpu.warpgroup_shapes import ACROSS, ALONG, PIECE, PIECES
from torch_pruner.families.base import Parameters
from torch_pruner.families.gpu_dots import form as dots
from torch_pruner.families.gpu_product.form import has_narrow_weights
from torch_pruner.graph.adjacency import columns_apart, rows_together
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph


N = TypeVar("N")


class GpuWarpgroupDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    bm: N  # rows of a block's tile
    bn: N  # columns of a block's tile, of a panel, and of an instruction
    bk: N  # positions of the reduction in a turn
    stages: N  # turns whose tiles shared memory holds at once
    warpgroups: N  # that share the rows of a block
    split: N  # blocks that share the turns of a tile; divides them
    cluster: N = 0  # type: ignore[assignment]  # 1: these read each other's sums in shared memory
    pack: N = 1  # type: ignore[assignment]  # 0: constant weights are read where they lie
    early: N = 0  # type: ignore[assignment]  # 1: weights are asked for before the kernel waits


def kinds(spec: Graph, *, pack: bool = True) -> tuple[int, int]:
    """How the tiles of both operands are kept. ``pack``: as for ``decisions.pack``."""
    con = contraction_of(spec)
    first = ACROSS if rows_together(spec, con) else ALONG
    if has_narrow_weights(spec):
        return first, ALONG
    if pack and constant_operand(spec, con) is not None:
        return first, PIECES
    return first, ALONG if columns_apart(spec, con) else ACROSS


def parameters(spec: Graph, decisions: GpuWarpgroupDecisions[int]) -> Parameters:
    """Panels as wide as a block's columns; operands that change are read where they lie.

    Scratch: what each part of a split reduction sums up, unless that stays in shared memory.
    """
    packs: dict[int, PackLayout] = {}
    con = contraction_of(spec)
    narrow = has_narrow_weights(spec)
    packs.update(dots.parameters(spec).packs if narrow else {})
    constant = constant_operand(spec, con) if decisions.pack and not narrow else None
    if constant is not None:
        (index, view), block, bk = constant, decisions.bn, decisions.bk
        form = "matmul" if con.form == "conv_phases" else con.form
        deep = -(-con.depth // bk) * bk
        shape = (con.groups, -(-con.n // block), deep // PIECE, block * PIECE)
        packs[index] = PackLayout(view, form, con.groups, block, shape, PIECE)
    sums = BufferSpec((decisions.split, con.groups, con.rows, con.n), con.acc_dtype)
    apart = decisions.split > 1 and not decisions.cluster
    return Parameters(packs, (sums,) if apart else ())
