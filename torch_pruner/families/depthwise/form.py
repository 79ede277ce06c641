"""What a depthwise kernel takes: its weights in panels of one vector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.packing import PackLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.ir import Graph


def parameters(spec: Graph, decisions: Mapping[str, int]) -> Parameters:
    """Panels of one vector, so that any number of vectors can be a tile."""
    packs: dict[int, PackLayout] = {}
    con = contraction_of(spec)
    constant = constant_operand(spec, con)
    if constant is None:
        raise ValueError("the weights of a depthwise kernel are constant")
    (index, view), lanes = constant, decisions["vl"]
    shape = (1, -(-con.n // lanes), con.depth, lanes)
    packs[index] = PackLayout(view, con.form, 1, lanes, shape)
    return Parameters(packs)
