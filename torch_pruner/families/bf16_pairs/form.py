"""Contractions of bfloat16 as instructions with pairs along the reduction take them.

Two instructions: a dot product of pairs (``bf16_pairs``), which steps through the reduction by 2,
and a product of tiles (``bf16_tiles``), which steps by 32. Both want the second operand in panels
``[group][column block][k pair][column][2]`` and the first with its k contiguous and padded to whole
steps: where it lies that way it is read in place, else the kernel copies it. Float32 that may be
rounded (``fast_math``) is rounded by that copy and by the packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import Contraction, constant_operand, contraction_of
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.phases import Division
from torch_pruner.graph.precision import is_fast
from torch_pruner.graph.signature import BufferSpec
from torch_pruner.graph.strided import Strided, strided

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Shape

STEPS = {"bf16_pairs": 2, "bf16_tiles": 32}
COLUMNS = 16  # of one vector or tile: pairs are 32 bits wide, vectors 512

N = TypeVar("N")
N_co = TypeVar("N_co", covariant=True)


class Bf16PairsDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    tm: N  # rows of a register tile
    nv: N  # vectors of 16 columns of a register tile
    mc: N  # chunks of rows
    order: N  # order of units: 0 panels outside, 1 chunks outside
    ku: N  # unrolled steps of the reduction, of two elements each
    tasks: N  # parallel tasks at most, among which units are shared out
    ahead: N  # 1: the next panel of constants is fetched early


class PairDecisions(Protocol[N_co]):
    """The decisions that schedules of pairs and of tiles share. See ``Bf16PairsDecisions``."""

    @property
    def nv(self) -> N_co: ...

    @property
    def mc(self) -> N_co: ...

    @property
    def order(self) -> N_co: ...

    @property
    def tasks(self) -> N_co: ...

    @property
    def ahead(self) -> N_co: ...


@dataclass(frozen=True, slots=True)
class PairForm:
    """What the operands of one kernel look like."""

    con: Contraction
    depth: int  # of the reduction, padded to whole steps
    place: Strided | None  # of the first operand, where it is read in place
    constant: tuple[int, Graph] | None  # the second operand's input and views

    def panel(self, block: int) -> Shape:
        """Shape of the packed second operand, in elements."""
        blocks = -(-self.con.n // block)
        return (self.con.groups, blocks, self.depth // 2, block * 2)

    @property
    def copy(self) -> Shape:
        """Shape of the first operand's copy."""
        return (self.con.groups, self.con.rows, self.depth)

    @property
    def rows(self) -> int:
        """Rows of each tile: as many tiles as rows need, filled evenly."""
        return -(-self.con.rows // -(-self.con.rows // 16))


def takes_pairs(graph: Graph) -> bool:
    """Whether the one contraction of ``graph`` is a product of matrices that are bfloat16 or,
    where ``fast_math`` allows it, rounded to that.

    Its sums may stay float32: they are rounded after the bias, as eager does.
    """
    con = contraction_of(graph)
    halves = all(is_half(graph, operand) for operand in (con.a, con.b))
    fits = halves or is_fast(graph.nodes[con.anchor])
    return con.form == "matmul" and fits and con.acc_dtype == "float32" and con.flops > 0


def is_half(graph: Graph, operand: int) -> bool:
    """Whether an operand need not be rounded."""
    return graph.nodes[operand].dtype == "bfloat16"


def pair_form(graph: Graph, family: str) -> PairForm:
    """The operands of ``graph`` (see ``takes_pairs``) for the family of that name."""
    con, step = contraction_of(graph), STEPS[family]
    (depth,) = con.k
    place = strided(graph, con.a) if is_half(graph, con.a) else None
    if place is not None and (depth % step or (depth > 1 and place.strides[-1] != 1)):
        place = None
    return PairForm(con, -(-depth // step) * step, place, constant_operand(graph, con))


def parameters(spec: Graph, family: str, block: int) -> Parameters:
    """Parameters of panels of ``block`` columns, for the family of that name.

    Scratch in order: an operand packed at run time, as words; rows copied.
    """
    packs: dict[int, PackLayout] = {}
    form = pair_form(spec, family)
    shape, scratch = form.panel(block), []
    if form.constant is not None:
        index, view = form.constant
        packs[index] = PackLayout(_rounded(view), form.con.form, form.con.groups, block, shape, 2)
    else:
        scratch.append(BufferSpec((*shape[:-1], block), "int32"))
    if form.place is None:
        scratch.append(BufferSpec(form.copy, "bfloat16"))
    return Parameters(packs, tuple(scratch))


def _rounded(view: Graph) -> Graph:
    """The same views of bfloat16s, rounded where they are not that."""
    (out,) = view.outputs
    if is_half(view, out):
        return view
    builder = GraphBuilder(list(view.nodes))
    return builder.finish([builder.cast(out, "bfloat16")])


def division(spec: Graph, decisions: Bf16PairsDecisions[int]) -> Division | None:
    """The columns of each task, where they are panels of all rows; None if not."""
    con, block = contraction_of(spec), decisions.nv * COLUMNS
    tiles = -(-con.rows // decisions.tm)
    if con.groups != 1 or min(decisions.mc, tiles) > 1:
        return None
    panels = -(-con.n // block)
    each = -(-panels // min(decisions.tasks, panels))
    tasks = -(-panels // each)
    return Division(tasks, each * block) if tasks > 1 else None
