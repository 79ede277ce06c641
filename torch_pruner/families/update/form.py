"""Decisions of updates, and which inputs a kernel of an update writes into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Shape

N = TypeVar("N")


class UpdateDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    chunk: N  # vectors of a parallel task
    par: N  # 1: tasks in parallel


def update_of(spec: Graph) -> int:
    """The position of the update in its kernel's graph."""
    return next(i for i, node in enumerate(spec.nodes) if node.kind is OpKind.UPDATE)


def lanes_of_columns(columns: Shape, most: int) -> int:
    """Lanes of a vector of neighbouring columns: a power of two that divides their number."""
    lanes = most
    while lanes > 1 and (not columns or columns[-1] % lanes):
        lanes //= 2
    return lanes
