"""What the parts of a kernel by minimal filtering share, and where its tiles lie."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import divided
from torch_pruner.codegen.parts.operands import phase
from torch_pruner.codegen.tir.builders import Buffer, Expr, T
from torch_pruner.codegen.tir.reader import Reader, unlinear

if TYPE_CHECKING:
    from torch_pruner.families.winograd.form import Winograd
    from torch_pruner.graph.contraction import ConvShape
    from torch_pruner.graph.ir import Graph, Shape


@dataclass(slots=True)
class Nest:
    """Everything the parts of one emission share."""

    spec: Graph
    plan: Winograd
    reader: Reader
    vl: int
    tm: int
    nv: int
    tb: int
    ku: int
    ahead: bool
    weights: Buffer
    inputs: Buffer  # (task, position, tile, channel of a group)
    products: Buffer  # (task, position, tile, column of the panel)
    out: Buffer
    counts: tuple[Expr | None, ...]  # of images, lines and columns those that are needed

    @property
    def grid(self) -> tuple[int | Expr, ...]:
        """Images and tiles along each dimension, as far as they are needed."""
        steps = (1, *self.plan.step)
        dense = (1, *self.plan.dilation)
        grid = zip(self.plan.grid, self.counts, steps, dense, strict=True)
        return tuple(
            most if n is None or d > 1 else T.floordiv(n + (s - 1), s) for most, n, s, d in grid
        )

    @property
    def varies(self) -> bool:
        """Whether the grid is known at run time only."""
        return any(n is not None for n in self.counts)

    @property
    def conv(self) -> ConvShape:
        assert self.plan.con.conv is not None
        return self.plan.con.conv

    @property
    def bn(self) -> int:
        return self.vl * self.nv

    @property
    def rows(self) -> int:
        """Tiles of a block."""
        return self.tm * self.tb


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile's place in the image."""

    nest: Nest
    image: Expr
    begin: tuple[Expr, ...]  # position of its first result
    shift: tuple[Expr, ...] | None = None  # by which its inputs lie further on

    def source(self, place: Shape) -> list[Expr]:
        """Position of an input of the tile."""
        plan, conv = self.nest.plan, self.nest.conv
        every = zip(self.begin, place, plan.dilation, plan.split, strict=True)
        found = [(b + i * g) * s if s > 1 else b + i * g for b, i, g, s in every]
        if self.shift is not None:
            found = [at + more for at, more in zip(found, self.shift, strict=True)]
        return [at - lo for at, lo in zip(found, conv.lo, strict=True)]

    def inside(self, place: Shape) -> list[Expr]:
        """Conditions under which an input exists, where it may not."""
        nest, plan, found = self.nest, self.nest.plan, []
        extent = nest.spec.nodes[plan.con.a].shape[2:]
        for d, position in enumerate(self.source(place)):
            offset, lo, split = place[d] * plan.dilation[d], nest.conv.lo[d], plan.split[d]
            last = (plan.last(d) + offset) * split + plan.reach[d] - lo
            found += [position >= 0] if offset * split < lo else []
            found += [position < extent[d]] if last >= extent[d] else []
        return found

    def result(self, place: Shape) -> tuple[list[Expr], list[Expr]]:
        """Position of a result, and conditions under which it exists, where it may not."""
        plan = self.nest.plan
        spot = [b + i * g for b, i, g in zip(self.begin, place, plan.dilation, strict=True)]
        extent = plan.con.m[1:]
        cut = [
            spot[d] < extent[d]
            for d in range(len(spot))
            if plan.last(d) + place[d] * plan.dilation[d] >= extent[d]
        ]
        return spot, cut


def tile_at(nest: Nest, number: Expr) -> Tile:
    if nest.varies:  # behind the last tile it is once more
        number = T.min(number, math.prod(nest.grid[1:], start=nest.grid[0]) - 1)
        image, *at = divided(number, nest.grid)
    else:
        image, *at = unlinear(number, nest.plan.grid)
    return Tile(nest, image, tuple(nest.plan.first(d, o) for d, o in enumerate(at)))


def shift_of(nest: Nest, g: Expr, part: Expr) -> tuple[Expr, ...] | None:
    """By how many positions inputs of a group, or of a part of the channels, lie further on."""
    plan = nest.plan
    if plan.by_phase:
        return tuple(late for late, _ in phase(plan.con, g))
    if math.prod(plan.parts) == 1:
        return None
    every = zip(unlinear(part, plan.parts), plan.taps, plan.split, plan.dilation, strict=True)
    return tuple(
        T.floordiv(p, s) * (t * s * d) + T.floormod(p, s) if s > 1 else p * (t * d)
        for p, t, s, d in every
    )
