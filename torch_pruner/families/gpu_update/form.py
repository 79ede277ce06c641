"""What an update on a GPU leaves open, and what its rows are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.update.form import update_of

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Shape

N = TypeVar("N")


class GpuUpdateDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # neighbouring elements of a thread
    threads: N  # threads of a block


@dataclass(frozen=True, slots=True)
class Rows:
    """What an update writes: a row for each of ``places``, each of which is ``line``."""

    update: int  # the node
    places: Shape  # of the indices
    lead: Shape  # axes before those that indices name
    tail: Shape  # and after them

    @property
    def count(self) -> int:
        return math.prod(self.places)

    @property
    def line(self) -> Shape:
        """Extents of a row."""
        return (*self.lead, *self.tail)


def rows_of(spec: Graph) -> Rows:
    """The rows of a kernel's one update."""
    at = update_of(spec)
    node = spec.nodes[at]
    dim, indices = node.attr("dim"), node.inputs[2:]
    after = node.shape[dim + len(indices) :]
    return Rows(at, spec.nodes[indices[0]].shape, node.shape[:dim], after)
