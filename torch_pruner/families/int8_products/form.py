"""Products of bytes by constant bytes, summed in 32 bits: operands in words of neighbours along k.

With VNNI a word has four bytes, of which the first operand's have no sign, and AArch64's ``sdot``
wants one: of an operand of the other kind each byte is 128 off, and the sums of the columns correct
that. Else a word has two numbers of 16 bits, whose products and their sums fit 32: nothing is ever
cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import Contraction, constant_operand, contraction_of
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.phases import Division
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

QUADS, PAIRS = 4, 2
SIGNED_LANES = 4  # of a vector whose instruction wants bytes with a sign
BYTES = frozenset(("int8", "uint8"))

N = TypeVar("N")


class Int8ProductsDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: sums of one vector
    word: N  # neighbours along the reduction in a word: 4 where bytes are multiplied, else 2
    tm: N  # rows of a register tile
    nv: N  # vectors of columns of a register tile
    mc: N  # chunks of rows
    par: N  # 1: tasks in parallel


@dataclass(frozen=True, slots=True)
class Int8Product:
    """One such product; ``index`` and ``view`` are of its second operand."""

    con: Contraction
    index: int
    view: Graph
    signed: bool  # the first operand is

    def depth(self, word: int) -> int:
        """Words of the reduction."""
        return -(-self.con.depth // word)

    def shifted(self, word: int, lanes: int) -> bool:
        """Whether bytes of the first operand are 128 off, for an instruction of so many lanes."""
        return word == QUADS and self.signed != (lanes == SIGNED_LANES)


def int8_product(spec: Graph) -> Int8Product | None:
    """The product that a graph's contraction is; None if it is another one."""
    con = contraction_of(spec)
    first, second = (spec.nodes[i].dtype for i in (con.a, con.b))
    if con.form != "matmul" or con.acc_dtype != "int32" or con.groups != 1:
        return None
    found = constant_operand(spec, con)
    if found is None or first not in BYTES or second != "int8":
        return None
    return Int8Product(con, *found, signed=first == "int8")


def parameters(spec: Graph, decisions: Int8ProductsDecisions[int]) -> Parameters:
    """Panels of words, and scratch for the first operand in words."""
    found = int8_product(spec)
    if found is None:
        raise ValueError("no product of bytes by constant bytes")
    con, word, block = found.con, decisions.word, decisions.vl * decisions.nv
    depth = found.depth(word)
    shape = (1, -(-con.n // block), depth, block * word)
    copy = BufferSpec((con.rows, depth * word), "uint8" if word == QUADS else "int16")
    return Parameters(
        {found.index: PackLayout(found.view, "matmul", 1, block, shape, word)}, (copy,)
    )


def division(spec: Graph, decisions: Int8ProductsDecisions[int]) -> Division | None:
    """The columns of each task, where rows are not divided."""
    con, width = contraction_of(spec), decisions.vl * decisions.nv
    whole = decisions.par and con.chunked(decisions.tm, decisions.mc)[0] == 1
    return Division(-(-con.n // width), width) if whole else None
