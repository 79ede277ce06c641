"""What products of few rows on a GPU leave open, and how their operands reach threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.families.int4_rows.form import int4_product
from torch_pruner.graph.adjacency import columns_apart
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.ops import FLOATS, ITEMSIZE
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.strided import common_width, only_viewed, reach

if TYPE_CHECKING:
    from torch_pruner.families.int4_rows.form import Int4Product
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")

ROWS = 16  # at most: with more, tensor cores have enough to do
NARROW_ROWS = 8  # of products of float32 with weights of few bits: with more, they become floats
DEPTH = 64  # at least: a warp has something of each column then
WIDEST, WORD_BYTES = 16, 4  # that a thread reads at once, and of words with numbers of few bits
GATHERED = 48 << 10  # of a block's shared memory, for a first operand that has to be computed


class GpuDotsDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    threads: N  # of a block
    along: N  # of them, threads that share the reduction of the same columns
    columns: N  # of these threads
    ahead: N  # times ``vectors`` of each column that a thread asks for before it multiplies
    early: N = 0  # type: ignore[assignment]  # 1: for the first of them before the kernel waits


def fits(spec: Graph) -> bool:
    """Whether there is such a kernel: weights that lie along the reduction, or can be packed so."""
    con = contraction_of(spec)
    if con.rows > ROWS or con.acc_dtype != "float32":
        return False
    if (product := words_product(spec)) is not None:
        return con.depth % product.per_word == 0
    if con.form != "matmul" or con.depth < DEPTH:
        return False
    narrow = spec.nodes[con.b].dtype in (*FLOATS, "int8")
    return narrow and (lies(spec, con) or constant_operand(spec, con) is not None)


def takes_bytes(rows: int, given: str, result: str) -> bool:
    """Whether there are kernels for products of so many rows of ``given`` with int8 weights: here,
    or by tiles in tensor cores (``gpu_product``)."""
    return rows <= NARROW_ROWS or given in ("float16", "bfloat16")


def takes_words(rows: int, given: str, *, full: bool) -> bool:
    """The same of words, which are ``full`` or not."""
    return full and takes_bytes(rows, given, "float32")


def words_product(spec: Graph) -> Int4Product | None:
    """The product with constant weights of few bits that a graph is, or None."""
    grouped = contraction_of(spec).form == "matmul_grouped"
    return int4_product(spec) if grouped else None


def never_written(spec: Graph, con: Contraction) -> bool:
    """Whether weights are there before the kernels in front of this one are done."""
    return words_product(spec) is not None or constant_operand(spec, con) is not None


def lies(spec: Graph, con: Contraction) -> bool:
    """Whether weights are read where they are."""
    viewed = con.a != con.b and only_viewed(spec, con.b)
    return viewed and columns_apart(spec, con) and reach(spec, con.b, -2, WIDEST) > 1


def gathered_bytes(spec: Graph, con: Contraction) -> int:
    """Of shared memory, for a first operand that a block computes or gathers before it is read.

    0 where its neighbours lie together, and where it is more than ``GATHERED``: then every thread
    computes what it needs.
    """
    size = con.rows * con.depth * ITEMSIZE[spec.nodes[con.a].dtype]
    return 0 if _given(spec, con) > 1 or size > GATHERED else size


def computes(spec: Graph, con: Contraction) -> bool:
    """Whether threads compute the first operand, each what it needs."""
    return _given(spec, con) <= 1 and not gathered_bytes(spec, con)


def _given(spec: Graph, con: Contraction) -> int:
    """Neighbours of the first operand that lie together in memory."""
    return reach(spec, con.a, -1, WIDEST // ITEMSIZE[spec.nodes[con.a].dtype])


def vectors(spec: Graph, con: Contraction) -> tuple[int, int]:
    """Neighbours along the reduction that a thread reads at once: of weights, of the first operand.

    The second divides the first, which divides the reduction, and groups of weights.
    """
    product = words_product(spec)
    if product is not None:
        each = product.per_word
        words = common_width(WIDEST // WORD_BYTES, con.depth // each, product.group // each)
        most = words * each
    elif lies(spec, con):
        most = common_width(reach(spec, con.b, -2, _widest(spec, con)), con.depth)
    else:
        most = common_width(_widest(spec, con), con.depth)
    if computes(spec, con):
        return most, 1
    own = min(most, WIDEST // ITEMSIZE[spec.nodes[con.a].dtype])
    return most, own if gathered_bytes(spec, con) else reach(spec, con.a, -1, own)


def _widest(spec: Graph, con: Contraction) -> int:
    return WIDEST // ITEMSIZE[spec.nodes[con.b].dtype]


def stored_bytes(spec: Graph, con: Contraction) -> float:
    """Of a weight."""
    product = words_product(spec)
    return product.stored_bytes(spec) if product else float(ITEMSIZE[spec.nodes[con.b].dtype])


def parameters(spec: Graph) -> Parameters:
    """Weights whose columns do not lie along the reduction are packed so."""
    con = contraction_of(spec)
    if (product := words_product(spec)) is not None:
        return Parameters(product.packs(1))
    constant = None if lies(spec, con) else constant_operand(spec, con)
    if constant is None:
        return Parameters()
    index, view = constant
    shape = (con.groups, con.n, con.depth, 1)
    return Parameters({index: PackLayout(view, con.form, con.groups, 1, shape)})
