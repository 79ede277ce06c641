"""Depthwise and grouped kernels: decisions, and weights in panels of one vector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.packing import PackLayout

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")


class DepthwiseDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: channels of one vector
    tw: N  # columns of a register tile
    th: N  # lines of a register tile
    nv: N  # vectors of channels of a register tile
    mc: N  # chunks of lines
    order: N  # 0 channels, lines, strips; 1 lines, channels, strips; 2 lines, strips, channels
    par: N  # 1: tasks in parallel


def parameters(spec: Graph, decisions: DepthwiseDecisions[int]) -> Parameters:
    """Panels of one vector, so that any number of vectors can be a tile."""
    packs: dict[int, PackLayout] = {}
    con = contraction_of(spec)
    constant = constant_operand(spec, con)
    if constant is None:
        raise ValueError("the weights of a depthwise kernel are constant")
    (index, view), lanes = constant, decisions.vl
    shape = (con.groups, -(-con.n // lanes), con.depth, lanes)
    packs[index] = PackLayout(view, con.form, con.groups, lanes, shape)
    return Parameters(packs)
