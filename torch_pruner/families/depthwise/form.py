"""Depthwise and grouped kernels: decisions, weights in panels of one vector, and who reads what."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import ConvShape
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")


class DepthwiseDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: channels of one vector
    tw: N  # columns of a register tile
    th: N  # lines of a register tile
    nv: N  # vectors of channels of a register tile
    mc: N  # chunks of lines
    order: N  # 0 channels, lines, strips; 1 lines, channels, strips; 2 lines, strips, channels
    par: N  # 1: tasks in parallel


def parameters(spec: Graph, decisions: DepthwiseDecisions[int]) -> Parameters:
    """Panels of one vector, so that any number of vectors can be a tile.

    Weights that change from call to call, those of layers in training, are put into such panels by
    the kernel; so are those of transposed convolutions.
    """
    con, lanes = contraction_of(spec), decisions.vl
    constant = None if con.form == "conv_transpose" else constant_operand(spec, con)
    if constant is None:
        shape = (-(-(con.groups * con.n) // lanes), con.depth, lanes)
        return Parameters(scratch=(BufferSpec(shape, con.acc_dtype),))
    index, view = constant
    panels = (con.groups, -(-con.n // lanes), con.depth, lanes)
    return Parameters({index: PackLayout(view, con.form, con.groups, lanes, panels)})


def readers(conv: ConvShape, axis: int, width: int) -> dict[int, list[tuple[int, int]]]:
    """By position of a tile's input along an axis, counted from ``first_read``: which of the
    tile's ``width`` outputs read it, each at which kernel offset.

    A transposed convolution's input has zeros between its elements, which nobody reads: of tiles
    that begin at a multiple of their distance it is known which output is next to which element.
    """
    stride, dilation = conv.stride[axis], conv.dilation[axis]
    found: dict[int, list[tuple[int, int]]] = {}
    for i, c in itertools.product(range(width), range(conv.kernel[axis])):
        place, beside = divmod(i * stride + c * dilation - conv.lo[axis], conv.dilate_input[axis])
        if not beside:
            found.setdefault(place, []).append((i, c))
    return dict(sorted(found.items()))


def first_read(conv: ConvShape, axis: int, start: int) -> int:
    """The position of the input from which ``readers`` counts, of a tile that begins at ``start``;
    as linear in it as multiples of ``dilate_input`` are."""
    return start * conv.stride[axis] // conv.dilate_input[axis]
