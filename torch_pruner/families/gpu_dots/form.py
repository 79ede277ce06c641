"""What products of few rows on a GPU leave open, and how their operands reach threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.adjacency import columns_apart
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.ops import FLOATS, ITEMSIZE
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.strided import common_width, only_viewed, reach

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")

ROWS = 16  # at most: with more, tensor cores have enough to do
BYTE_ROWS = 8  # of int8 weights: with more, floats in tensor cores are expected to be as fast
DEPTH = 64  # at least: a warp has something of each column then
WIDEST = 16  # bytes that a thread reads at once
GATHERED = 48 << 10  # of a block's shared memory, for a first operand that has to be computed


class GpuDotsDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    threads: N  # of a block
    along: N  # of them, threads that share the reduction of the same columns
    columns: N  # of these threads
    ahead: N  # times ``vectors`` of each column that a thread asks for before it multiplies


def fits(spec: Graph) -> bool:
    """Whether there is such a kernel: weights that lie along the reduction, or can be packed so."""
    con = contraction_of(spec)
    if con.form != "matmul" or con.acc_dtype != "float32" or con.rows > ROWS or con.depth < DEPTH:
        return False
    if spec.nodes[con.b].dtype not in (*FLOATS, "int8") or gathered_bytes(spec, con) > GATHERED:
        return False
    return lies(spec, con) or constant_operand(spec, con) is not None


def lies(spec: Graph, con: Contraction) -> bool:
    """Whether weights are read where they are."""
    viewed = con.a != con.b and only_viewed(spec, con.b)
    return viewed and columns_apart(spec, con) and reach(spec, con.b, -2, WIDEST) > 1


def gathered_bytes(spec: Graph, con: Contraction) -> int:
    """Of shared memory, for a first operand that a block computes or gathers before it is read."""
    of = spec.nodes[con.a]
    if reach(spec, con.a, -1, WIDEST // ITEMSIZE[of.dtype]) > 1:
        return 0
    return con.rows * con.depth * ITEMSIZE[of.dtype]


def vectors(spec: Graph, con: Contraction) -> tuple[int, int]:
    """Neighbours along the reduction that a thread reads at once: of weights, of the first operand.

    The second divides the first, which divides the reduction.
    """
    most = WIDEST // ITEMSIZE[spec.nodes[con.b].dtype]
    if lies(spec, con):
        most = reach(spec, con.b, -2, most)
    most = common_width(most, con.depth)
    own = min(most, WIDEST // ITEMSIZE[spec.nodes[con.a].dtype])
    return most, own if gathered_bytes(spec, con) else reach(spec, con.a, -1, own)


def parameters(spec: Graph) -> Parameters:
    """Weights whose columns do not lie along the reduction are packed so."""
    con = contraction_of(spec)
    constant = None if lies(spec, con) else constant_operand(spec, con)
    if constant is None:
        return Parameters()
    index, view = constant
    shape = (con.groups, con.n, con.depth, 1)
    return Parameters({index: PackLayout(view, con.form, con.groups, 1, shape)})
