"""What a tiled product on a GPU takes: panels as wide as a block, sums of a split reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.families.gpu_dots import form as dots
from torch_pruner.graph.adjacency import columns_apart
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.signature import BufferSpec
from torch_pruner.graph.strided import reach

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph


N = TypeVar("N")

FOURS = 4  # neighbours of 16 bytes together
COPIED = 16  # bytes, by one asynchronous copy


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
    pack: N = 1  # type: ignore[assignment]  # 0: constant weights are read where they lie


def has_narrow_weights(spec: Graph) -> bool:
    """Whether weights of eight bits or four are multiplied with halves: tiles have halves of both.

    They lie along the reduction then, as ``gpu_dots`` wants them.
    """
    con = contraction_of(spec)
    if spec.nodes[con.a].dtype not in ("float16", "bfloat16") or con.conv is not None:
        return False
    if con.form == "matmul_grouped":
        product = dots.words_product(spec)
        return product is not None and con.depth % product.per_word == 0
    there = dots.lies(spec, con) or constant_operand(spec, con) is not None
    return spec.nodes[con.b].dtype == "int8" and there


def in_fours(spec: Graph, decisions: GpuProductDecisions[int]) -> bool:
    """Whether a packed operand lies by ``FOURS``."""
    return bool(decisions.tensor) and spec.nodes[contraction_of(spec).b].dtype == "float32"


def weights_lie(spec: Graph) -> bool:
    """Whether constant weights can be copied from where they lie, sixteen bytes at a time."""
    con = contraction_of(spec)
    if con.conv is not None or has_narrow_weights(spec) or constant_operand(spec, con) is None:
        return False
    most = COPIED // ITEMSIZE[spec.nodes[con.b].dtype]
    return reach(spec, con.b, -2 if columns_apart(spec, con) else -1, most) == most


def parameters(spec: Graph, decisions: GpuProductDecisions[int]) -> Parameters:
    """Panels as wide as a block's columns; operands that change are read where they lie.

    In panels of float32 for tensor cores ``FOURS`` neighbours along the reduction lie together, as
    these read them. Scratch: what each part of a split reduction sums up.
    """
    packs: dict[int, PackLayout] = {}
    con = contraction_of(spec)
    narrow = has_narrow_weights(spec)
    packs.update(dots.parameters(spec).packs if narrow else {})
    constant = constant_operand(spec, con) if decisions.pack and not narrow else None
    if constant is not None:
        (index, view), block = constant, decisions.bn
        form = "matmul" if con.form == "conv_phases" else con.form
        along = FOURS if in_fours(spec, decisions) else 1
        deep = -(-con.depth // decisions.bk) * decisions.bk if along > 1 else con.depth
        shape = (con.groups, -(-con.n // block), deep // along, block * along)
        packs[index] = PackLayout(view, form, con.groups, block, shape, along)
    sums = BufferSpec((decisions.split, con.groups, con.rows, con.n), con.acc_dtype)
    return Parameters(packs, (sums,) if decisions.split > 1 else ())
