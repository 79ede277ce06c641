"""Convolutions of three taps by minimal filtering in every dimension that has three.

Two neighbouring results of three taps take four products instead of six (Winograd 1980; Lavin and
Gray, "Fast Algorithms for Convolutional Neural Networks", 2015): ``y = A^T [(G g) * (B^T d)]``. In
two dimensions that is 16 products for four results instead of 36, in three 64 for eight instead of
216. For every place in the tile ("position") the sums over channels are one product of matrices.

Of these algorithms F(2, 3) alone rounds no worse than the sum it replaces: its transforms add and
halve. F(4, 3) takes 36 products for sixteen results instead of 144 and rounds worse; it is for
convolutions that may be less exact (``graph.precision``). An infinite input spreads over its tile
as NaN, as it does in vendors' libraries.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from torch_pruner.families.base import Parameters
from torch_pruner.families.winograd.matrices import (
    MORE_RESULTS,
    RESULTS,
    TAPS,
    Matrix,
    transforms,
)
from torch_pruner.graph.contraction import Contraction, constant_operand, contraction_of
from torch_pruner.graph.packing import PackLayout, operand_form
from torch_pruner.graph.precision import is_fast
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Shape

Array = npt.NDArray[Any]
MAX_DEPTH = 1024  # channels that are summed in one go without losing digits
_FEW = 16  # inputs of a tile: two results along both dimensions of an image
_MOST = 64  # the same along three; transforms are written out, and grow with it

N = TypeVar("N")


class WinogradDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    tm: N  # rows of a register tile: tiles of the convolution
    nv: N  # vectors of a row of a register tile
    tb: N  # register tiles of a block
    mc: N  # chunks of blocks among parallel tasks
    nc: N  # shares of groups, or of one's columns, among parallel tasks; the latter transform anew
    ku: N  # unrolled channels of the reduction
    ahead: N  # 1: the next weights are fetched early
    par: N  # 1: tasks in parallel


@dataclass(frozen=True, slots=True)
class Winograd:
    """Extents of one such convolution; ``tile`` and ``step`` are 1 where the kernel is."""

    con: Contraction
    step: Shape  # results of a tile, by spatial dimension
    tile: Shape  # inputs of a tile: products for these results

    @property
    def positions(self) -> int:
        return math.prod(self.tile)

    @property
    def few(self) -> bool:
        """Whether registers hold all of a tile, which has two results in a dimension."""
        return max(self.step) <= RESULTS and self.positions <= _FEW

    @property
    def groups(self) -> int:
        return self.con.groups

    @property
    def channels(self) -> int:
        """Of a group."""
        return self.con.k[-1]

    @property
    def grid(self) -> Shape:
        """Images and tiles along each dimension."""
        counts = []
        for extent, step, dilation in zip(self.con.m[1:], self.step, self.dilation, strict=True):
            whole, rest = divmod(extent, step * dilation)
            counts.append(whole * dilation + min(dilation, rest))
        return (self.con.m[0], *counts)

    @property
    def dilation(self) -> Shape:
        """Distance of neighbouring inputs of a tile, and of its results; 1 where it has one."""
        assert self.con.conv is not None
        pairs = zip(self.con.conv.dilation, self.step, strict=True)
        return tuple(d if s > 1 else 1 for d, s in pairs)

    def first(self, d: int, tile: Any) -> Any:
        """Position of the first result of a tile (a number or an expression) along a dimension.

        Tiles of a dilated convolution interleave.
        """
        step, dilation = self.step[d], self.dilation[d]
        if dilation == 1:
            return tile * step
        return tile // dilation * (step * dilation) + tile % dilation

    def last(self, d: int) -> int:
        """The largest that ``first`` gives."""
        return int(self.first(d, self.grid[1 + d] - 1))

    @property
    def tiles(self) -> int:
        return math.prod(self.grid)

    @property
    def flops(self) -> int:
        """Operations of the products; direct convolution takes up to 2.25 times as many, or 4."""
        return 2 * self.tiles * self.positions * self.groups * self.channels * self.con.n

    def blocked(self, rows: int, chunks: int) -> tuple[int, int]:
        """(chunks, blocks of ``rows`` tiles in each) nearest to ``chunks``; none is empty."""
        blocks = -(-self.tiles // rows)
        each = -(-blocks // min(chunks, blocks))
        return -(-blocks // each), each

    def input_transform(self) -> list[tuple[Matrix, ...]]:
        """By dimension, factors of the matrix; the first is applied first."""
        return [transforms(t).input for t in self.tile]

    def weight_transform(self) -> list[Matrix]:
        return [transforms(t).weight for t in self.tile]

    def output_transform(self) -> list[tuple[Matrix, ...]]:
        """By dimension, factors of the matrix; the first is applied first."""
        return [transforms(t).output for t in self.tile]


def winograd_of(graph: Graph, results: int = RESULTS) -> Winograd | None:
    """The tiles of a kernel graph's convolution, of so many results along a dimension of three
    taps: two, or four; None where the algorithm does not apply.

    It does for float32 convolutions of one to three dimensions with three taps (or one, not
    everywhere), that visit every position; they may be dilated. Weights that are not constant may
    be turned, as gradients of inputs read them (``conv_transpose``). More than two results are for
    convolutions that were marked (``graph.precision.allow_fast``).
    """
    con = contraction_of(graph)
    conv, forms = con.conv, ("conv", "conv_transpose")
    if conv is None or con.form not in forms or con.k[-1] > MAX_DEPTH:
        return None
    if {graph.nodes[i].dtype for i in (con.anchor, con.b)} != {"float32"}:
        return None
    dense = {*conv.stride, *conv.dilate_input} == {1}
    if not dense or max(conv.kernel) != TAPS or not {*conv.kernel} <= {1, TAPS}:
        return None
    if con.form == "conv_transpose" and constant_operand(graph, con) is not None:
        return None
    if results > RESULTS and not is_fast(graph.nodes[con.anchor]):
        return None
    step = tuple(results if k > 1 else 1 for k in conv.kernel)
    plan = Winograd(con, step, tuple(s + k - 1 for s, k in zip(step, conv.kernel, strict=True)))
    return plan if plan.positions <= _MOST else None


def transformed(weights: Array, groups: int, results: int = RESULTS) -> Array:
    """``G g G^T`` of weights (o, i, *kernel) as (group, positions * i, o), rounded once.

    Of ``o``, ``groups`` times as many as there, neighbours are of a group.
    """
    result = weights.astype(np.float64)
    for d, taps in enumerate(weights.shape[2:], 2):
        matrix = np.array(transforms(taps + results - 1 if taps > 1 else 1).weight)
        result = np.moveaxis(np.tensordot(matrix, result, (1, d)), 0, d)
    outputs, channels = weights.shape[:2]
    flat = result.reshape(groups, outputs // groups, channels, -1).astype(weights.dtype)
    return flat.transpose(0, 3, 2, 1).reshape(groups, -1, outputs // groups)


def additions(matrices: list[tuple[Matrix, ...]]) -> int:
    """Additions of a transform that is applied dimension by dimension, factor by factor.

    What a term is multiplied by comes with its addition.
    """
    sizes = [len(factors[0][0]) for factors in matrices]
    total = 0
    for d, factors in enumerate(matrices):
        for matrix in factors:
            terms = sum(sum(c != 0 for c in row) - 1 for row in matrix)
            total += terms * math.prod(sizes) // sizes[d]
            sizes[d] = len(matrix)
    return total


def places(shape: Shape) -> list[Shape]:
    """All indices of ``shape``, in order."""
    return list(itertools.product(*(range(n) for n in shape)))


def parameters(
    spec: Graph, decisions: WinogradDecisions[int], results: int = RESULTS
) -> Parameters:
    """Scratch in order: for each task transformed inputs of a block, and a panel's products;
    transformed weights, where no caller packs them."""
    packs: dict[int, PackLayout] = {}
    plan = winograd_of(spec, results)
    if plan is None:
        raise ValueError("no convolution of three neighbouring taps")
    block = decisions.vl * decisions.nv
    shape = (plan.groups, -(-plan.con.n // block), plan.positions * plan.channels, block)
    constant = constant_operand(spec, plan.con)
    if constant is not None:
        packs[constant[0]] = PackLayout(constant[1], _FORMS[results], plan.groups, block, shape)
    rows = decisions.tm * decisions.tb
    tasks = plan.blocked(rows, decisions.mc)[0] * decisions.nc
    scratch = tuple(
        BufferSpec((tasks, plan.positions, rows, width), plan.con.acc_dtype)
        for width in (plan.channels, block)
    )
    own = () if packs else (BufferSpec(shape, plan.con.acc_dtype),)
    return Parameters(packs, (*scratch, *own))


_FORMS = {RESULTS: "winograd", MORE_RESULTS: "winograd4"}
for _results, _name in _FORMS.items():
    operand_form(_name, partial(transformed, results=_results))
