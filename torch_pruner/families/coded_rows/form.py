"""Products of few rows whose second operand is kept in twelve bits: see ``graph.coded``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Parameters
from torch_pruner.families.in_place.form import Format, in_place_of, scratch
from torch_pruner.graph.coded import VECTORS, Places
from torch_pruner.graph.contraction import constant_operand
from torch_pruner.graph.packing import PackLayout

if TYPE_CHECKING:
    from torch_pruner.families.in_place.form import InPlace
    from torch_pruner.graph.ir import Graph

BYTES = 2 * 6 / VECTORS
"""Of a number, its code and its lower byte."""


def coded_of(graph: Graph) -> InPlace | None:
    """The product that the graph's contraction is, if its weights are known to code well."""
    found = in_place_of(graph)
    if found is None or found.con.conv is not None or found.con.groups != 1:
        return None
    operand = constant_operand(graph, found.con)
    if operand is None:
        return None
    return found if graph.nodes[graph.inputs[operand[0]]].is_coded else None


def places(spec: Graph, lanes: int) -> tuple[int, Places]:
    """Which input the weights are, and where their parts lie."""
    found = coded_of(spec)
    assert found is not None
    operand = constant_operand(spec, found.con)
    assert operand is not None
    return operand[0], Places(found.con.n, found.con.depth, lanes)


def parameters(spec: Graph, lanes: int) -> Parameters:
    """The coded weights, and the first operand's copy as scratch."""
    found = coded_of(spec)
    if found is None:
        raise ValueError("no product of few rows with weights that code well")
    operand = constant_operand(spec, found.con)
    assert operand is not None
    index, view = operand
    at = Places(found.con.n, found.con.depth, lanes)
    layout = PackLayout(view, "matmul", 1, at.words, (1, 1, 1, at.words), code=lanes)
    return Parameters({index: layout}, scratch(spec))


def format_of(lanes: int) -> Format:
    """What the draft model has to know: of a block, the number of its patch, and instructions.

    Three loads and 23 other instructions make eight vectors.
    """
    return Format(BYTES + 2 / (VECTORS * lanes), 2.3)
