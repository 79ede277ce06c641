"""Kernels for gradients of depthwise weights: decisions, and sums between chunks of positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import dealt
from torch_pruner.graph.depthwise_gradient import DepthwiseGradient, gradient_of
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")

SUMMED = 1024
"""Products that are summed in one go at most, as longer sums lose digits."""


class DepthwiseGradientDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: channels of one vector
    nv: N  # vectors of channels of a register tile
    tc: N  # taps of a line of the kernel in a register tile
    lb: N  # lines of positions that are summed in one go
    mc: N  # chunks of such blocks
    par: N  # 1: tasks in parallel


@dataclass(frozen=True, slots=True)
class Lines:
    """The positions of all images as lines; those that are too long to sum are cut.

    A line is a piece of the innermost axis of a result, ``piece`` positions, the last one fewer.
    """

    outer: tuple[int, ...]  # images, and all axes but the innermost
    width: int
    pieces: int
    piece: int

    @property
    def count(self) -> int:
        return math.prod(self.outer) * self.pieces


def lines_of(of: DepthwiseGradient) -> Lines:
    *outer, width = of.positions
    pieces = -(-width // SUMMED)
    piece = -(-width // pieces)
    return Lines((of.images, *outer), width, -(-width // piece), piece)


def chunked(of: DepthwiseGradient, lb: int, mc: int) -> tuple[int, int]:
    """(chunks, blocks of ``lb`` lines in each) nearest to ``mc``; none is empty."""
    return dealt(-(-lines_of(of).count // lb), mc)


def parameters(spec: Graph, decisions: DepthwiseGradientDecisions[int]) -> Parameters:
    """Scratch: sums of each chunk, channels innermost."""
    of = gradient_of(spec)
    if of is None:
        raise ValueError("not the gradient of depthwise weights with channels last")
    chunks, _ = chunked(of, decisions.lb, decisions.mc)
    vectors = -(-of.channels // decisions.vl)
    shape = (chunks, math.prod(of.taps), vectors * decisions.vl)
    return Parameters(scratch=(BufferSpec(shape, of.con.acc_dtype),))
