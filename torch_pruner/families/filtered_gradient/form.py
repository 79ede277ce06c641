"""Gradients of three-tap convolutions' weights by minimal filtering: ``winograd``, differentiated.

With ``y = A^T [(G g) * (B^T d)]`` a weight's gradient is ``G^T [(A dy) * (B^T d)]``, summed over
all tiles: of each two neighbouring results and the four inputs that they are made of, in each
dimension that has three taps. In two dimensions that is 16 products where the sum takes 36. For
every place in the tile ("position") the sums over tiles are one product of matrices: input's by
output's channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.gradient.form import gradient_of
from torch_pruner.families.winograd.matrices import RESULTS, TAPS, Matrix, transforms
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph, Shape

N = TypeVar("N")


class FilteredGradientDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    tm: N  # channels of the input in a register tile
    nv: N  # vectors of the output's channels in a register tile
    tb: N  # tiles of a block: the sums of a register tile
    cs: N  # shares of the input's channels among parallel tasks
    ns: N  # shares of the output's channels
    ku: N  # unrolled tiles
    par: N  # 1: tasks in parallel


@dataclass(frozen=True, slots=True)
class FilteredGradient:
    """Extents of one such gradient; ``step`` and ``tile`` are 1 where the kernel is."""

    con: Contraction
    step: Shape  # results of a tile, by spatial dimension
    tile: Shape  # its inputs

    @property
    def channels(self) -> int:
        return self.con.m[0]

    @property
    def positions(self) -> int:
        return math.prod(self.tile)

    @property
    def grid(self) -> Shape:
        """Images and tiles along each dimension."""
        extents = zip(self.con.k[:-1], self.step, strict=True)
        return (self.con.k[-1], *(-(-n // s) for n, s in extents))

    @property
    def tiles(self) -> int:
        return math.prod(self.grid)

    @property
    def flops(self) -> int:
        """Operations of the products; the sum takes up to 2.25 times as many."""
        return 2 * self.tiles * self.positions * self.channels * self.con.n

    def input_transform(self) -> list[Matrix]:
        return [transforms(t).input[0] for t in self.tile]

    def result_transform(self) -> list[Matrix]:
        """Of a tile of what the convolution's results get."""
        return [turned(transforms(t).output[0]) for t in self.tile]

    def weight_transform(self) -> list[Matrix]:
        return [turned(transforms(t).weight) for t in self.tile]


def turned(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix, strict=True))


def filtered_gradient_of(graph: Graph) -> FilteredGradient | None:
    """The tiles of a kernel graph's contraction; None where the algorithm does not apply.

    It does for float32 gradients of dense convolutions' weights, one or two dimensions, both
    operands channels last, with three taps (or one, not everywhere) that visit every position.
    """
    found = gradient_of(graph)
    if found is None:
        return None
    con, conv, taps = found.con, found.con.conv, found.con.m[1:]
    assert conv is not None
    dense = {*conv.stride, *conv.dilation, *conv.dilate_input} == {1}
    if not dense or len(taps) > 2 or max(taps) != TAPS or not {*taps} <= {1, TAPS}:
        return None
    step = tuple(RESULTS if t > 1 else 1 for t in taps)
    return FilteredGradient(con, step, tuple(s + t - 1 for s, t in zip(step, taps, strict=True)))


def scratch(spec: Graph, decisions: FilteredGradientDecisions[int]) -> tuple[BufferSpec, ...]:
    """Scratch of each task: a block's transformed inputs and results, and the sums."""
    plan = filtered_gradient_of(spec)
    if plan is None:
        raise ValueError("no gradient of three neighbouring taps with channels last")
    tasks, positions = decisions.cs * decisions.ns, plan.positions
    rows, columns = plan.channels // decisions.cs, plan.con.n // decisions.ns
    return tuple(
        BufferSpec((tasks, positions, *shape), plan.con.acc_dtype)
        for shape in ((rows, decisions.tb), (columns, decisions.tb), (rows, columns))
    )
