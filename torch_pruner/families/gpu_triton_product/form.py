"""What a product by Triton takes: columns of weights in one piece each, sums of parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.precision import is_tf32
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.cards import Card
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")


class GpuTritonProductDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    bm: N  # rows of a block's tile
    bn: N  # columns of a block's tile
    bk: N  # positions of the reduction in a turn
    warps: N
    stages: N  # turns whose tiles shared memory holds at once
    near: N  # rows of tiles whose blocks come one after another, before the next columns
    split: N = 1  # type: ignore[assignment]  # blocks that share the turns of a tile; divides them
    pack: N = 1  # type: ignore[assignment]  # 0: constant weights are read where they lie
    blocks: N = 0  # type: ignore[assignment]  # that take all tiles in turns; 0: a block for each


def in_tensor_cores(spec: Graph, card: Card) -> bool:
    """Whether a card's tensor cores take the operands."""
    con = contraction_of(spec)
    if con.acc_dtype != "float32":
        return False
    dtype = spec.nodes[con.a].dtype
    if dtype == "float32":
        return card.tf32_flops > 0 and is_tf32(spec.nodes[con.anchor])
    return dtype == "float16" or (dtype == "bfloat16" and card.has_bfloat16)


def packed_depth(depth: int, bk: int) -> int:
    """Elements of a packed column: whole turns of the reduction, the last filled up by zeros."""
    return -(-depth // bk) * bk


def parameters(spec: Graph, decisions: GpuTritonProductDecisions[int]) -> Parameters:
    """Constant weights as columns, each in one piece, of whole blocks; what changes as it lies.

    So every card's instructions read them: ``wgmma`` takes float32 along the reduction alone.
    Scratch: what each part of a split reduction sums up.
    """
    con = contraction_of(spec)
    packs: dict[int, PackLayout] = {}
    constant = constant_operand(spec, con) if decisions.pack else None
    if constant is not None:
        (index, view), block = constant, decisions.bn
        form = "matmul" if con.form == "conv_phases" else con.form
        deep = packed_depth(con.depth, decisions.bk)
        shape = (con.groups, -(-con.n // block), 1, block * deep)
        packs[index] = PackLayout(view, form, con.groups, block, shape, deep)
    sums = BufferSpec((decisions.split, con.groups, con.rows, con.n), con.acc_dtype)
    return Parameters(packs, (sums,) if decisions.split > 1 else ())
