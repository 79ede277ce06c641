"""Gradients of convolutions' weights, as backward graphs have them.

They are lowered to convolutions with batch and channels exchanged: rows are the input's channels at
each tap, columns the output's channels, and the kernel is as large as an image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from torch_pruner.graph.contraction import constant_operand, contraction_of, dealt, is_narrow
from torch_pruner.graph.signature import BufferSpec
from torch_pruner.graph.strided import strided

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")

SUMMED = 1024
"""Products in one go at most: longer sums lose digits."""


class GradientDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    tm: N  # channels of the input in a register tile
    nv: N  # vectors of the output's channels in a register tile
    mc: N  # chunks of tiles
    lb: N  # lines of positions in a block of the reduction
    par: N  # 1: tasks in parallel


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a convolution's weights, both operands channels last.

    A line is what the innermost axis of an image of the second operand holds, or one of ``pieces``
    of it, where it is too long to be summed in one go; the reduction passes over ``lines`` of them,
    ``piece`` positions each.
    """

    con: Contraction

    @property
    def channels(self) -> int:
        """Channels of the convolution's input: rows of the product at one tap."""
        return self.con.m[0]

    @property
    def taps(self) -> int:
        return math.prod(self.con.m[1:])

    @property
    def width(self) -> int:
        return self.con.k[-2]

    @property
    def piece(self) -> int:
        return -(-self.width // -(-self.width // SUMMED))

    @property
    def pieces(self) -> int:
        return -(-self.width // self.piece)

    @property
    def lines(self) -> int:
        return self.con.k[-1] * math.prod(self.con.k[:-2]) * self.pieces

    def tiles(self, tm: Any) -> Any:
        """Tiles of ``tm`` channels (a number or an array), over all taps."""
        return -(-self.channels // tm) * self.taps


def gradient_of(graph: Graph) -> Gradient | None:
    """What the graph's contraction is the gradient of; None if it is another one.

    None, too, where groups, narrow operands or the order of channels ask for the general sketch.
    """
    con = contraction_of(graph)
    constant = constant_operand(graph, con) is not None
    if con.form != "conv" or con.groups != 1 or constant or is_narrow(graph, con):
        return None
    if con.acc_dtype != "float32":
        return None
    for operand in (con.a, con.b):
        place = strided(graph, operand)
        if place is None or place.strides[0] != 1:
            return None
    return Gradient(con)


def scratch(spec: Graph, decisions: GradientDecisions[int]) -> tuple[BufferSpec, ...]:
    """Scratch: sums of the tiles of every task, between blocks of lines."""
    found = gradient_of(spec)
    if found is None:
        raise ValueError("no gradient of a convolution's weights with channels last")
    if decisions.lb == found.lines:
        return ()
    tm, block = decisions.tm, decisions.vl * decisions.nv
    chunks, tiles = dealt(found.tiles(tm), decisions.mc)
    tasks = chunks * -(-found.con.n // block)
    return (BufferSpec((tasks, tiles, tm, block), found.con.acc_dtype),)
