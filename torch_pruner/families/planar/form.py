"""Convolutions in planes: which they are, their geometry, decisions, and packed weights.

Three spatial axes always: those that a convolution has not are of one position. A task copies the
lines that it reads into a region of its own, padding included, apart by phases: positions that are
alike modulo the stride. Then each kernel offset is a shift of the whole region, lines and all, and
lanes run on from one line to the next. A strided transposed convolution is a convolution of stride
one for each output position modulo its stride (``graph.contraction``), all of the same region.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.strided import strided

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph

FEW_LANES = 4
UNROLLED_FMAS = 288
"""Vector multiply-adds of a channel that are written out; of more, loops over kernel lines."""

N = TypeVar("N")
Three = tuple[int, int, int]


class PlanarDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: positions of one vector
    tm: N  # output channels of a register tile
    nv: N  # vectors of positions of a register tile
    ln: N  # output lines whose region is copied at a time
    rp: N  # parts of a group's output channels: each copies the region for itself
    mc: N  # chunks of all tasks
    par: N  # 1: chunks in parallel
    cp: N  # 1: lines are copied into a region; 0: read where they lie
    bl: N = 0  # type: ignore[assignment]  # 1: vectors of a tile lie below one another, one a line


@dataclass(frozen=True, slots=True)
class Phase:
    """Kernel offsets of an axis whose positions are ``number`` modulo the stride.

    Offset ``first + j * step`` reads ``shift + j * apart`` positions further in the phase.
    """

    number: int
    first: int
    step: int
    count: int
    shift: int
    apart: int

    @property
    def reach(self) -> int:
        """The largest shift."""
        return self.shift + (self.count - 1) * self.apart


@dataclass(frozen=True, slots=True)
class Lying:
    """Where lines that may be read without a copy lie: as ``graph.strided.Strided``."""

    source: int
    offset: int
    image: int  # from one to the next, like what follows
    channel: int
    plane: int


@dataclass(frozen=True, slots=True)
class Planes:
    """Geometry of one convolution; tuples are depth, height and width."""

    images: int
    groups: int
    rows: int  # output channels of a group
    channels: int  # input channels of a group
    extent: Three
    out: Three
    kernel: Three
    stride: Three
    dilation: Three
    lo: Three
    rank: int  # spatial axes that the values have
    spread: Three = (1, 1, 1)  # results of a position: the stride of a transposed convolution
    padding: Three = (0, 0, 0)  # of that, modulo the stride

    def parts(self, axis: int) -> list[tuple[int, int]]:
        """Of each result of a position: by how much further on it reads, and its place."""
        s, p = self.spread[axis], self.padding[axis]
        return [((h + p) // s, (2 * s - 1 - p - h) % s) for h in range(s)]

    def late(self, axis: int) -> int:
        """By how much further on results of a position read at most."""
        return max(late for late, _ in self.parts(axis))

    @property
    def results(self) -> int:
        """Results of a position: convolutions of weights of their own."""
        return math.prod(self.spread)

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def depth(self) -> int:
        """Products of a sum."""
        return self.channels * self.taps

    def phases(self, axis: int) -> list[Phase]:
        stride, dilation = self.stride[axis], self.dilation[axis]
        found: dict[int, list[int]] = {}
        for r in range(self.kernel[axis]):
            found.setdefault(r * dilation % stride, []).append(r)
        step = stride // math.gcd(stride, dilation)
        return [
            Phase(p, rs[0], step, len(rs), rs[0] * dilation // stride, step * dilation // stride)
            for p, rs in sorted(found.items())
        ]

    @property
    def pitch(self) -> int:
        """Positions of a line of the region."""
        return self.out[2] + max(p.reach for p in self.phases(2)) + self.late(2)

    def dealt(self, count: int, lanes: int) -> int:
        """Lanes of the vectors in which ``count`` positions of a line are taken, every other one of
        the input's: ``lanes``, or less where lines are short. 0: they are gathered one by one."""
        while lanes > FEW_LANES and (lanes > count or 2 * lanes > self.extent[2]):
            lanes //= 2
        fits = FEW_LANES <= lanes <= count and 2 * lanes <= self.extent[2]
        return lanes if self.stride[2] == 2 and fits else 0

    def lines(self, ln: Any) -> Any:
        """Lines of a phase of the region, for ``ln`` lines of the result (a number or an array)."""
        return ln + max(p.reach for p in self.phases(1)) + self.late(1)

    @property
    def planes(self) -> int:
        """Planes of a channel in the region."""
        return self.kernel[0] + self.late(0)

    @property
    def copies(self) -> int:
        """Pieces of lines of a channel in the region, each ``lines`` times ``pitch``."""
        return self.planes * len(self.phases(1)) * len(self.phases(2))

    def region(self, ln: Any) -> Any:
        """Elements of the region (a number or an array)."""
        return self.channels * self.copies * self.lines(ln) * self.pitch

    def read_below(self, count: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Lines of the region that a kernel column of a plane reads for ``count`` result lines.

        By line and phase of lines, in order: kernel lines that meet it, each with the result line.
        """
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for a, phase in enumerate(self.phases(1)):
            for j, line in itertools.product(range(phase.count), range(count)):
                at = (phase.shift + j * phase.apart + line, a)
                found.setdefault(at, []).append((phase.first + j * phase.step, line))
        return dict(sorted(found.items()))

    def blocks(self, tm: int) -> int:
        """Register tiles of a group's output channels."""
        return -(-self.rows // tm)

    def tasks(self, tm: int, ln: int, rp: int) -> tuple[int, int, int, int, int]:
        """Images, groups, parts of the output channels, planes, and chunks of lines."""
        parts = -(-self.blocks(tm) // -(-self.blocks(tm) // rp))
        return (self.images, self.groups, parts, self.out[0], -(-self.out[1] // ln))


def lying(spec: Graph, con: Contraction, planes: Planes) -> Lying | None:
    """The lines of ``con``'s operand, or None: not each result reads the one position of its own,
    or lines do not lie one behind another."""
    same = planes.kernel == planes.stride == planes.spread == (1, 1, 1)
    place = strided(spec, con.a)
    if not same or any(planes.lo) or planes.extent != planes.out or place is None:
        return None
    width, rank = planes.out[2], planes.rank
    spatial = place.strides[2:]
    if spatial[-1] != 1 or (rank > 1 and spatial[-2] != width):
        return None
    plane = spatial[0] if rank > 2 else 0
    return Lying(place.source, place.offset, place.strides[0], place.strides[1], plane)


def planes_of(spec: Graph, con: Contraction) -> Planes:
    """The geometry of ``con``, a convolution, a depthwise or a strided transposed one."""
    assert con.conv is not None
    conv, image, weight = con.conv, spec.nodes[con.a].shape, spec.nodes[con.b].shape
    rank = len(image) - 2

    def three(values: tuple[int, ...], missing: int) -> Three:
        a, b, c = (*(missing,) * (3 - rank), *values)
        return a, b, c

    if con.form == "conv_phases":
        groups, rows, channels = 1, con.n, con.k[-1]
    else:
        groups = con.n if con.form == "depthwise" else con.groups
        rows, channels = weight[0] // groups, weight[1]
    spread = con.batch if con.form == "conv_phases" else (1,) * rank
    return Planes(
        image[0],
        groups,
        rows,
        channels,
        three(image[2:], 1),
        three(con.m[1:], 1),
        three(conv.kernel, 1),
        three(conv.stride, 1),
        three(conv.dilation, 1),
        three(conv.lo, 0),
        rank,
        three(spread, 1),
        three(conv.phase or (0,) * rank, 0),
    )


def parameters(spec: Graph, decisions: PlanarDecisions[int]) -> Parameters:
    """Weights in panels of ``tm`` output channels, a channel's kernel after another's; those of a
    transposed convolution as its view has them, tap by tap."""
    con = contraction_of(spec)
    planes, constant = planes_of(spec, con), constant_operand(spec, con)
    if constant is None:
        raise ValueError("the weights of a planar kernel are constant")
    index, view = constant
    tm, sums = decisions.tm, planes.groups * planes.results
    shape = (sums, planes.blocks(tm), planes.depth, tm)
    if con.form == "conv_phases":
        return Parameters({index: PackLayout(view, "matmul", sums, tm, shape)})
    b = GraphBuilder()
    x = 0
    for node in view.nodes:
        x = b.again(node, node.inputs)
    x = b.reshape(x, (planes.groups, planes.rows, planes.depth))
    turned = b.finish([b.permute(x, (0, 2, 1))])
    return Parameters({index: PackLayout(turned, "matmul", sums, tm, shape)})
