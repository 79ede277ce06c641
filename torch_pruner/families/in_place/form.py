"""Products of few rows whose second operand lies along the reduction, as a linear layer's weights.

Each of its elements is used once for every row, so a packed copy of it would gain nothing: vectors
along the reduction read it where it lies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.graph.contraction import contraction_of, copied_shape, dealt
from torch_pruner.graph.ops import FLOATS, ITEMSIZE
from torch_pruner.graph.phases import Division
from torch_pruner.graph.signature import BufferSpec
from torch_pruner.graph.strided import adjacent

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph

MAX_ROWS = 16

N = TypeVar("N")


class InPlaceDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    nv: N  # vectors of the reduction that are summed side by side
    nc: N  # columns that are summed together
    nb: N  # blocks of ``vl`` columns in a task
    ahead: N  # bytes from a read to its fetch; of several columns: not 0 fetches the next ones
    par: N  # 1: tasks in parallel


@dataclass(frozen=True, slots=True)
class InPlace:
    """Such a product. ``copied``: the first operand is copied before, as the dtype of the sums."""

    con: Contraction
    copied: bool


def in_place_of(graph: Graph) -> InPlace | None:
    """The product that the graph's contraction is; None if it is another one."""
    con = contraction_of(graph)
    if con.rows > MAX_ROWS or con.acc_dtype not in FLOATS or not _plain(con):
        return None
    first, second = (-1, -2) if con.conv is None else (1, 1)  # the axis of the reduction
    if not adjacent(graph, con.b, second):
        return None
    wide = graph.nodes[con.a].dtype == con.acc_dtype
    return InPlace(con, not (wide and adjacent(graph, con.a, first)))


class Format(NamedTuple):
    """What the draft model has to know of how the second operand is kept."""

    itemsize: float
    """Bytes of an element in memory."""
    widening: float
    """Instructions that make a vector of floats of it, besides the load."""


_WIDENING = {"bfloat16": 1.0, "float16": 1.0, "int8": 1.2}


def format_of(graph: Graph, con: Contraction) -> Format:
    """How the second operand of a product is kept: see ``reading.reading_of``."""
    dtype = graph.nodes[con.b].dtype
    return Format(ITEMSIZE[dtype], _WIDENING.get(dtype, 0.0))


def axpy_of(graph: Graph) -> Contraction | None:
    """The product of few rows whose second operand's columns are neighbours; None if another one.

    Its rows of columns are added up, each times an element of the first operand.
    """
    con = contraction_of(graph)
    few = con.rows <= MAX_ROWS and con.form == "matmul" and con.acc_dtype in FLOATS
    return con if few and adjacent(graph, con.b, -1) else None


def _plain(con: Contraction) -> bool:
    """Whether the reduction is over one axis: a product of matrices, or convolution of one tap."""
    if con.conv is None:
        return True
    return con.form == "conv" and math.prod(con.k[:-1]) == 1 and not con.conv.copies_input


def scratch(spec: Graph) -> tuple[BufferSpec, ...]:
    """Scratch: the first operand, where it is copied."""
    found = in_place_of(spec)
    if found is None:
        raise ValueError("no product of few rows with a second operand along the reduction")
    shape = copied_shape(spec, found.con)
    return (BufferSpec(shape, found.con.acc_dtype),) if found.copied else ()


def division(spec: Graph, decisions: InPlaceDecisions[int]) -> Division | None:
    """The columns of each task, where one product of matrices is divided by nothing else."""
    found = in_place_of(spec)
    if found is None or found.con.conv is not None or found.con.groups != 1:
        return None
    blocks = -(-found.con.n // decisions.vl)
    tasks, each = dealt(blocks, -(-blocks // decisions.nb))
    return Division(tasks, each * decisions.vl) if decisions.par else None
