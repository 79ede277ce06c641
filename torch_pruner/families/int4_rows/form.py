"""Products with weights of four bits: their operands, and what few rows of them take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import constant_operand, contraction_of, copied_shape
from torch_pruner.graph.nibbles import DIGITS, per_word
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.phases import Division
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph

MAX_ROWS = 16
DIGITS_EACH = 3  # of a number in fixed point
QUAD_LANES = 16  # of the vectors whose words of four bytes an instruction multiplies and adds up
PART_WORDS = 8  # of digits times nibbles, at most, whose sums 16 bits hold
HALF = 1 << 15  # what they do not hold
TABLE_BYTES = 64  # of a vector whose sixteen floats are all the numbers that there are

N = TypeVar("N")


class Int4RowsDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    nv: N  # vectors of columns in a panel
    split: N  # sums of each element of the result side by side
    early: N  # 1: weights are scaled before they are multiplied; 0: sums of groups are
    table: N  # how numbers become floats: a way of ``codegen.parts.nibbles``
    ahead: N  # bytes from a read to its fetch
    par: N  # 1: panels in parallel


@dataclass(frozen=True, slots=True)
class FixedRow:
    """Words of a row in fixed point: ``digits``, then the facts of each group, and whether it is
    of use.

    Facts are what eight times the sum of each digit is, of each of a group's ``parts`` (where
    ``slots`` is two, of both halves of its words, with 16 bits each), and the scale.
    """

    digits: int
    groups: int
    parts: int
    slots: int

    @property
    def each(self) -> int:
        """Facts of a group."""
        return DIGITS_EACH * self.parts + 1

    @property
    def size(self) -> int:
        return self.digits + (self.groups + 1) * self.each


def fixed_point(con: Contraction, group: int, lanes: int) -> FixedRow:
    """How a row of a product's first operand is kept, if as digits."""
    groups, words = -(-con.depth // group), group // per_word(4)
    parts = next(p for p in range(1, words + 1) if words % p == 0 and words // p <= PART_WORDS)
    quads = lanes == QUAD_LANES
    digits = groups * group // 4 * DIGITS_EACH
    return FixedRow(digits, groups, 1 if quads else parts, 1 if quads else 2)


@dataclass(frozen=True, slots=True)
class Int4Product:
    """One such product. ``operands``: (input, views) of words, scales and perhaps offsets."""

    con: Contraction
    bits: int
    group: int
    operands: tuple[tuple[int, Graph], ...]

    @property
    def per_word(self) -> int:
        """Numbers in a word: positions of the reduction."""
        return per_word(self.bits)

    @property
    def offsets(self) -> bool:
        """Whether weights have offsets."""
        return len(self.operands) > 2

    def packs(self, block: int) -> dict[int, PackLayout]:
        """Panels of ``block`` columns of all operands."""
        con = self.con
        blocks = -(-con.n // block)
        rows = [-(-con.depth // self.per_word)] + [-(-con.depth // self.group)] * 2
        return {
            index: PackLayout(view, "matmul", 1, block, (1, blocks, count, block))
            for (index, view), count in zip(self.operands, rows, strict=False)
        }

    def stored_bytes(self, spec: Graph) -> float:
        """Bytes of a weight with its share of a scale."""
        size = {"bfloat16": 2, "float16": 2}
        scales = spec.nodes[spec.nodes[self.con.anchor].inputs[2]].dtype
        return self.bits / 8 + (len(self.operands) - 1) * size.get(scales, 4) / self.group


def int4_product(spec: Graph) -> Int4Product | None:
    """The product that a graph's contraction is; None where its weights are not constant."""
    con = contraction_of(spec)
    node = spec.nodes[con.anchor]
    operands = [constant_operand(spec, replace(con, b=i)) for i in node.inputs[1:]]
    found = tuple(o for o in operands if o is not None)
    if len(found) < len(operands):
        return None
    return Int4Product(con, node.attr("bits"), node.attr("group"), found)


def copies(spec: Graph, con: Contraction) -> bool:
    """Whether the first operand is copied as float32 before."""
    return spec.nodes[con.a].dtype != con.acc_dtype


def parameters(spec: Graph, decisions: Int4RowsDecisions[int]) -> Parameters:
    """Panels, and the first operand's copy as scratch."""
    found = int4_product(spec)
    if found is None:
        raise ValueError("no product with constant weights of four bits")
    con = found.con
    packs = found.packs(decisions.vl * decisions.nv)
    if decisions.table == DIGITS:
        size = fixed_point(con, found.group, decisions.vl).size
        return Parameters(packs, (BufferSpec((con.rows, size), "int32"),))
    copy = BufferSpec(copied_shape(spec, con), con.acc_dtype)
    return Parameters(packs, (copy,) if copies(spec, con) else ())


def division(spec: Graph, decisions: Int4RowsDecisions[int]) -> Division | None:
    """The columns of each task."""
    con, width = contraction_of(spec), decisions.vl * decisions.nv
    return Division(-(-con.n // width), width) if decisions.par else None
