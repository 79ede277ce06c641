"""Register-tiled contractions: decisions, panels, a copied input, sums between blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import (
    constant_operand,
    contraction_of,
    copied_shape,
    copies_first,
    is_narrow,
    is_widened,
)
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.phases import Division
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")

LONG_SUM, SUM_PART = 1024, 256
"""Products of a block that are summed in one go at most, and of a part where there are more."""


PACKED_NEAR = 2
"""Of ``pack``: every task packs the panel that it reads, a block of the reduction at a time."""


class ContractionDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    tm: N  # rows of a register tile
    nv: N  # vectors of a row of a register tile
    mc: N  # chunks of rows
    order: N  # order of parallel tasks: 0 panels outside, 1 chunks outside
    ku: N  # unrolled positions of the reduction
    pack: N  # 1: the second operand is packed into panels; constants always are (2: see above)
    par: N  # 1: tasks in parallel
    ahead: N  # 1: the next panel of constants is fetched early
    kb: N  # blocks of the reduction; all tiles of a chunk pass by one before the next


def parameters(spec: Graph, decisions: ContractionDecisions[int]) -> Parameters:
    """Scratch in order: a panel packed at run time, the input copied, sums between blocks."""
    packs: dict[int, PackLayout] = {}
    con = contraction_of(spec)
    static = constant_operand(spec, con)
    widened = bool(is_widened(spec, con, static is not None, decisions))
    block = decisions.vl * decisions.nv
    shape = (con.groups, -(-con.n // block), con.depth, block)
    scratch: list[BufferSpec] = []
    if static is not None:
        index, view = static
        form = "matmul" if con.form == "conv_phases" else con.form  # the view has split phases
        packs[index] = PackLayout(view, form, con.groups, block, shape)
    elif decisions.pack == 1 or (con.n % block and not decisions.pack):
        # Unpacked panels must not reach past a row's end.
        scratch.append(BufferSpec(shape, con.acc_dtype if widened else spec.nodes[con.b].dtype))
    if copies_first(spec, con, widened):
        dtype = con.acc_dtype if widened else spec.nodes[con.a].dtype
        scratch.append(BufferSpec(copied_shape(spec, con), dtype))
    if decisions.kb > 1:
        scratch.append(sums_between(con, decisions))
    return Parameters(packs, tuple(scratch))


class TaskDecisions(Protocol):
    """The decisions that say which tiles a task has."""

    @property
    def vl(self) -> int: ...

    @property
    def nv(self) -> int: ...

    @property
    def tm(self) -> int: ...

    @property
    def mc(self) -> int: ...


def sums_between(con: Contraction, decisions: TaskDecisions) -> BufferSpec:
    """(task, tile, row, column): sums that wait for the next block of the reduction."""
    block = decisions.vl * decisions.nv
    chunks, tiles = con.chunked(decisions.tm, decisions.mc)
    tasks = con.groups * -(-con.n // block) * chunks
    return BufferSpec((tasks, tiles, decisions.tm, block), con.acc_dtype)


def packs_near(spec: Graph, con: Contraction) -> bool:
    """Whether tasks can pack the panel that they read: of a product of numbers as wide as its
    sums, both operands of which change."""
    whole = con.form == "matmul" and not is_narrow(spec, con)
    return whole and constant_operand(spec, con) is None


def only_copies(spec: Graph, decisions: ContractionDecisions[int]) -> bool:
    """Whether all scratch is the first operand's copy, which a part of its own makes."""
    con = contraction_of(spec)
    static = constant_operand(spec, con) is not None
    copied = copies_first(spec, con, bool(is_widened(spec, con, static, decisions)))
    return copied and len(parameters(spec, decisions).scratch) == 1


def division(spec: Graph, decisions: ContractionDecisions[int]) -> Division | None:
    """The columns of each task, where a product of matrices is divided by nothing else."""
    con = contraction_of(spec)
    if not decisions.par or con.conv is not None or con.groups != 1:
        return None
    width = decisions.vl * decisions.nv
    packs = constant_operand(spec, con) is None
    packs = packs and (decisions.pack == 1 or bool(con.n % width and not decisions.pack))
    if packs or con.chunked(decisions.tm, decisions.mc)[0] != 1:
        return None
    return Division(-(-con.n // width), width)


def partial_sums(con: Contraction, kb: Any) -> Any:
    """How many parts of sums a tile adds up, where ``kb`` blocks (a number or an array) are long.

    A part takes a load, an addition and a store of every sum.
    """
    long = (con.depth > LONG_SUM * kb) & (con.acc_dtype == "float32")
    return long * (con.depth / SUM_PART)
