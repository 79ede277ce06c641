"""What a tiled product on a GPU takes: panels as wide as a block, sums of a split reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.ir import Graph


def parameters(spec: Graph, decisions: Mapping[str, int]) -> Parameters:
    """Panels as wide as a block's columns; operands that change are read where they lie.

    Scratch: what each part of a split reduction sums up.
    """
    packs: dict[int, PackLayout] = {}
    con = contraction_of(spec)
    if (constant := constant_operand(spec, con)) is not None:
        (index, view), block = constant, decisions["bn"]
        form = "matmul" if con.form == "conv_phases" else con.form
        shape = (con.groups, -(-con.n // block), con.depth, block)
        packs[index] = PackLayout(view, form, con.groups, block, shape)
    parts = decisions.get("split", 1)
    sums = BufferSpec((parts, con.groups, con.rows, con.n), con.acc_dtype)
    return Parameters(packs, (sums,) if parts > 1 else ())
