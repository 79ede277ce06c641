"""Contractions of bfloat16 as instructions with pairs along the reduction take them.

Two instructions: a dot product of pairs (sketch ``dot``), which steps through the reduction by 2,
and a product of tiles (sketch ``tiles``), which steps by 32. Both want the second operand in panels
``[group][column block][k pair][column][2]`` and the first with its k contiguous and padded to whole
steps: where it lies that way it is read in place, else the kernel copies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import Contraction, constant_operand, contraction_of
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.signature import BufferSpec
from torch_pruner.graph.strided import Strided, strided

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.ir import Graph, Shape

STEPS = {"bf16_pairs": 2, "bf16_tiles": 32}
COLUMNS = 16  # of one vector or tile: pairs are 32 bits wide, vectors 512


@dataclass(frozen=True, slots=True)
class PairForm:
    """What the operands of one kernel look like."""

    con: Contraction
    depth: int  # of the reduction, padded to whole steps
    place: Strided | None  # of the first operand, where it is read in place
    constant: tuple[int, Graph] | None  # the second operand's input and views

    def panel(self, block: int) -> Shape:
        """Of the packed second operand, in elements."""
        blocks = -(-self.con.n // block)
        return (self.con.groups, blocks, self.depth // 2, block * 2)

    @property
    def copy(self) -> Shape:
        """Of the first operand's copy."""
        return (self.con.groups, self.con.rows, self.depth)

    def sums(self, decisions: Mapping[str, int]) -> Shape:
        """Of the float32 sums that leave tile registers, for every parallel task."""
        return (decisions["tasks"], decisions["rt"] * self.rows, decisions["nv"] * COLUMNS)

    @property
    def rows(self) -> int:
        """Rows of each tile: as many tiles as rows need, filled evenly."""
        return -(-self.con.rows // -(-self.con.rows // 16))


def takes_pairs(graph: Graph) -> bool:
    """Whether the one contraction of ``graph`` is a product of bfloat16 matrices.

    Its sums may stay float32: they are rounded after the bias, as eager does.
    """
    con = contraction_of(graph)
    halves = all(graph.nodes[i].dtype == "bfloat16" for i in (con.a, con.b))
    return con.form == "matmul" and halves and con.acc_dtype == "float32" and con.flops > 0


def pair_form(graph: Graph, sketch: str) -> PairForm:
    """The operands of ``graph`` (see ``takes_pairs``) for the sketch of that name."""
    con, step = contraction_of(graph), STEPS[sketch]
    (depth,) = con.k
    place = strided(graph, con.a)
    if place is not None and (depth % step or (depth > 1 and place.strides[-1] != 1)):
        place = None
    return PairForm(con, -(-depth // step) * step, place, constant_operand(graph, con))


def parameters(spec: Graph, family: str, decisions: Mapping[str, int]) -> Parameters:
    """Scratch in order: an operand packed at run time, as words; rows copied; sums of tiles."""
    packs: dict[int, PackLayout] = {}
    form, block = pair_form(spec, family), decisions["nv"] * COLUMNS
    shape, scratch = form.panel(block), []
    if form.constant is not None:
        index, view = form.constant
        packs[index] = PackLayout(view, form.con.form, form.con.groups, block, shape, 2)
    else:
        scratch.append(BufferSpec((*shape[:-1], block), "int32"))
    if form.place is None:
        scratch.append(BufferSpec(form.copy, "bfloat16"))
    if family == "bf16_tiles":  # a line of the cache for every row: stacks are not aligned so well
        scratch.append(BufferSpec(form.sums(decisions), "float32"))
    return Parameters(packs, tuple(scratch))
