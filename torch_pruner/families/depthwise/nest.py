"""How depthwise and grouped convolutions are divided: lines, and strips of columns."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.families.depthwise.form import first_read, readers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_pruner.codegen.tir.builders import Buffer, Expr, ForKind
    from torch_pruner.codegen.tir.reader import Reader
    from torch_pruner.graph.contraction import Contraction, ConvShape
    from torch_pruner.graph.ir import Graph


@dataclass(slots=True)
class Nest:
    """Everything the parts of one emission share."""

    spec: Graph
    con: Contraction
    conv: ConvShape
    reader: Reader
    weights: Buffer
    out: Buffer
    vl: int
    tw: int
    th: int
    nv: int
    order: int
    kind: ForKind  # of loops over tasks
    counts: tuple[Expr | None, ...]  # of images, lines and columns those that are needed

    @property
    def extent(self) -> tuple[int, ...]:
        """Spatial extents of the input."""
        return self.spec.nodes[self.con.a].shape[2:]

    @property
    def channels(self) -> int:
        """Output channels of all groups."""
        return self.con.groups * self.con.n

    @property
    def lines(self) -> tuple[int, ...]:
        """Images and tiles of output lines."""
        images, *outer, _ = self.con.m
        return (images, *outer[:-1], -(-outer[-1] // self.th)) if outer else (images,)


@dataclass(frozen=True, slots=True)
class Strip:
    """``count`` strips of ``width`` output columns from column ``first``; ``inside`` the input."""

    first: int
    count: int
    width: int
    inside: bool


def strips_of(nest: Nest) -> Iterator[Strip]:
    conv, width, tw = nest.conv, nest.con.m[-1], nest.tw

    def single(first: int) -> Strip:
        here = min(tw, width - first)
        places = [first_read(conv, -1, first) + at for at in readers(conv, -1, here)]
        return Strip(first, 1, here, all(0 <= p < nest.extent[-1] for p in places))

    found = [single(first) for first in range(0, width, tw)]
    for _, alike in itertools.groupby(found, lambda s: (s.width, s.inside, s.inside or s.first)):
        same = list(alike)
        yield Strip(same[0].first, len(same), same[0].width, same[0].inside)
