"""Convolutions of three taps, or two, by minimal filtering in every dimension that has so many.

Two neighbouring results of three taps take four products instead of six (Winograd 1980; Lavin and
Gray, "Fast Algorithms for Convolutional Neural Networks", 2015): ``y = A^T [(G g) * (B^T d)]``. In
two dimensions that is 16 products for four results instead of 36, in three 64 for eight instead of
216. For every place in the tile ("position") the sums over channels are one product of matrices.

Of these algorithms F(2, 3) alone rounds no worse than the sum it replaces: its transforms add and
halve. F(4, 3) takes 36 products for sixteen results instead of 144 and rounds worse; it is for
convolutions that may be less exact (``graph.precision``). An infinite input spreads over its tile
as NaN, as it does in vendors' libraries.

Two neighbouring results of two taps, F(2, 2), take three products instead of four, and additions
alone. That is for strides: a convolution of four taps and stride two is one of two taps of the
positions that are alike modulo two, whose channels are those of both; a transposed one is one of
two taps for each position of a result modulo the stride (``conv_phases``). Where the stride does
not divide the kernel, some of the positions that are alike have a tap less, and no product with the
last input of a tile: of three taps and stride two in two dimensions there are 25 instead of 36.

Longer kernels are sums of such ones, whose inputs lie further on ("pieces"): five taps are three
and two, seven products for two results instead of ten, 49 for four instead of 100.
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
    PAIR,
    RESULTS,
    TAPS,
    Matrix,
    transforms,
)
from torch_pruner.graph.contraction import Contraction, constant_operand, contraction_of
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.packing import PackLayout, operand_form
from torch_pruner.graph.precision import is_fast
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Shape

Array = npt.NDArray[Any]
MAX_DEPTH = 1024  # channels that are summed in one go without losing digits
_FEW = 16  # inputs of a tile: two results along both dimensions of an image
_MOST = 64  # the same along three; transforms are written out, and grow with it
_PIECES = 4  # of a kernel along a dimension, at most

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
    taps: Shape  # by spatial dimension
    step: Shape  # results of a tile
    tile: Shape  # inputs of a tile: products for these results
    split: Shape  # distance of neighbouring inputs: positions alike modulo that are channels beside
    pieces: Shape  # of the kernel, which are channels beside, too

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
        """Of a group, once for each part."""
        return self.con.k[-1] * math.prod(self.parts)

    @property
    def parts(self) -> Shape:
        """Of the channels: positions modulo the stride, of a piece after another."""
        return tuple(s * n for s, n in zip(self.split, self.pieces, strict=True))

    @property
    def by_phase(self) -> bool:
        """Whether groups are positions of the result modulo the stride."""
        return self.con.form == "conv_phases"

    @property
    def whole(self) -> Shape:
        """How many of the parts have all taps: the first ones."""
        conv = self.con.conv
        assert conv is not None
        if self.by_phase:
            return self.parts
        every = zip(conv.kernel, self.taps, self.split, self.parts, strict=True)
        return tuple(
            sum(p // s * t * s + p % s < k - (t - 1) * s for p in range(n)) for k, t, s, n in every
        )

    @property
    def filled(self) -> float:
        """Share of positions in tiles and parts that have products."""
        every = zip(self.tile, self.whole, self.parts, strict=True)
        return math.prod((t - 1 + n / p) / t for t, n, p in every)

    @property
    def reach(self) -> Shape:
        """By how many positions inputs of a group, or of a part of the channels, lie further on, at
        most."""
        conv = self.con.conv
        assert conv is not None
        if self.by_phase:
            pairs = zip(self.con.batch, conv.phase, strict=True)
            return tuple((s - 1 + p) // s for s, p in pairs)
        every = zip(self.taps, self.split, self.pieces, self.dilation, strict=True)
        return tuple((n - 1) * t * s * d + s - 1 for t, s, n, d in every)

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
        products = round(self.positions * self.filled * self.channels)
        return 2 * self.tiles * self.groups * products * self.con.n

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

    It does for float32 convolutions of one to three dimensions with two or three taps (or one, not
    everywhere), that visit every position; they may be dilated. Those of constant weights may have
    a stride, which taps are counted modulo, or be transposed ones with a stride, or have up to
    twelve taps. Weights that are
    not constant may be turned, as gradients of inputs read them (``conv_transpose``). More than two
    results are of three taps, and for convolutions that were marked
    (``graph.precision.allow_fast``).
    """
    con = contraction_of(graph)
    if con.conv is None or {graph.nodes[i].dtype for i in (con.anchor, con.b)} != {"float32"}:
        return None
    found = _taps(graph, con)
    if found is None:
        return None
    taps, split, pieces = found
    known = {1, PAIR, TAPS} if results == RESULTS else {1, TAPS}
    if max(taps) == 1 or not {*taps} <= known:
        return None
    if results > RESULTS and not (is_fast(graph.nodes[con.anchor]) and {*split, *pieces} == {1}):
        return None
    step = tuple(results if k > 1 else 1 for k in taps)
    tile = tuple(s + k - 1 for s, k in zip(step, taps, strict=True))
    plan = Winograd(con, taps, step, tile, split, pieces)
    return plan if plan.positions <= _MOST and plan.channels <= MAX_DEPTH else None


def _taps(graph: Graph, con: Contraction) -> tuple[Shape, Shape, Shape] | None:
    """Taps of neighbouring inputs, how far apart these lie in the input, and pieces of the kernel
    that have so many."""
    conv = con.conv
    assert conv is not None
    ones, constant = (1,) * len(conv.kernel), constant_operand(graph, con) is not None
    if con.form == "conv" and {*conv.stride} == {1} and max(conv.kernel) <= TAPS:
        return conv.kernel, ones, ones
    if con.form == "conv_transpose" and {*conv.stride, *conv.dilate_input} == {1} and not constant:
        return conv.kernel, ones, ones
    if not constant or any(node.is_count for node in graph.nodes):
        return None
    if con.form == "conv_phases":
        return con.k[:-1], ones, ones
    if con.form != "conv" or (max(conv.stride) > 1 and max(conv.dilation) > 1):
        return None
    pairs = list(zip(conv.kernel, conv.stride, strict=True))
    if any(k < s for k, s in pairs):  # positions that nobody reads
        return None
    taps, pieces = zip(*(_pieces(-(-k // s)) for k, s in pairs), strict=True)
    return None if max(pieces) > _PIECES else (taps, conv.stride, pieces)


def _pieces(count: int) -> tuple[int, int]:
    """Taps of a piece, and pieces, of so many taps: what has fewest products of two results."""
    if count <= TAPS:
        return count, 1
    options = [(n, -(-count // n)) for n in (TAPS, PAIR)]
    return min(options, key=lambda of: of[1] * (of[0] + 1) - (of[0] * of[1] > count))


def transformed(weights: Array, groups: int = 1, results: int = RESULTS) -> Array:
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


def transformed_phases(weights: Array, groups: int, taps: Shape) -> Array:
    """The same of weights (group, taps * i, o), as ``graph.contraction`` has them of phases."""
    outputs, rank = weights.shape[-1], len(taps)
    operand = weights.reshape(groups, *taps, -1, outputs)
    moved = operand.transpose(0, rank + 2, rank + 1, *range(1, rank + 1))
    return transformed(moved.reshape(groups * outputs, -1, *taps), groups)


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
        index, view = constant
        form = _FORMS[results]
        if plan.by_phase:
            form = _phases_form(plan.taps)
        elif math.prod(plan.parts) > 1:
            view = _apart(view, plan)
        packs[index] = PackLayout(view, form, plan.groups, block, shape)
    rows = decisions.tm * decisions.tb
    tasks = plan.blocked(rows, decisions.mc)[0] * decisions.nc
    scratch = tuple(
        BufferSpec((tasks, plan.positions, rows, width), plan.con.acc_dtype)
        for width in (plan.channels, block)
    )
    own = () if packs else (BufferSpec(shape, plan.con.acc_dtype),)
    return Parameters(packs, (*scratch, *own))


def _apart(view: Graph, plan: Winograd) -> Graph:
    """Weights (o, i, *kernel) as (o, parts and i, *taps)."""
    b, x = GraphBuilder(), 0
    for node in view.nodes:
        x = b.again(node, node.inputs)
    outputs, channels, *kernel = b.shape(x)
    rank = len(plan.taps)
    divided = list(zip(plan.pieces, plan.taps, plan.split, strict=True))
    whole = [math.prod(of) for of in divided]
    if whole != kernel:
        none, hi = (0,) * (2 + rank), (0, 0, *(w - k for w, k in zip(whole, kernel, strict=True)))
        shape = (outputs, channels, *whole)
        x = b.append("pad", (x,), shape, b.dtype(x), lo=none, hi=hi, value=0.0)
    x = b.reshape(x, (outputs, channels, *(n for of in divided for n in of)))
    parts = (2 + 3 * d + at for d in range(rank) for at in (0, 2))
    x = b.permute(x, (0, *parts, 1, *range(3, 3 + 3 * rank, 3)))
    return b.finish([b.reshape(x, (outputs, channels * math.prod(plan.parts), *plan.taps))])


def _phases_form(taps: Shape) -> str:
    return "winograd_phases_" + "x".join(map(str, taps))


for _rank in (1, 2, 3):
    for _each in itertools.product((1, PAIR, TAPS), repeat=_rank):
        operand_form(_phases_form(_each), partial(transformed_phases, taps=_each))
_FORMS = {RESULTS: "winograd", MORE_RESULTS: "winograd4"}
for _results, _name in _FORMS.items():
    operand_form(_name, partial(transformed, results=_results))
