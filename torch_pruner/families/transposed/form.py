"""Decisions of elementwise kernels that turn what they read across, and which kernels those are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.graph.crossing import crossing

if TYPE_CHECKING:
    from torch_pruner.graph.crossing import Crossing
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")


class TransposedDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector, and vectors of a square
    tile: N  # squares below each other that are turned one after another
    chunk: N  # squares of a parallel task
    par: N  # 1: tasks in parallel


def crossed(spec: Graph, lanes: int) -> Crossing | None:
    """What an elementwise kernel turns in squares of ``lanes``, or None: nothing."""
    from torch_pruner.codegen.parts.concatenation import joined_innermost

    return None if joined_innermost(spec) is not None else crossing(spec, lanes)
