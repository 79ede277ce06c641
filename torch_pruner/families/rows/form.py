"""Row kernels: decisions, and a row of scratch for what is kept between passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.graph.rows import row_domain
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")


class RowsDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    lanes: N  # vectors that accumulate side by side
    chunk: N  # rows of a parallel task
    par: N  # 1: tasks in parallel
    apart: N  # 1: these vectors are of so many parts of a row


def parted_axis(spec: Graph, lanes: int, vl: int) -> int | None:
    """Which of a row's axes, by its place among them, is divided into ``lanes`` parts that vectors
    read side by side: the outermost that can be. None: none can."""
    domain = row_domain(spec)
    *outer, last = (domain.shape[a] for a in domain.axes)
    for place, extent in enumerate(outer):
        if extent % lanes == 0:
            return place
    return len(outer) if last % (lanes * vl) == 0 else None


def row_tasks(spec: Graph, decisions: RowsDecisions[int]) -> tuple[int, int]:
    """(rows of one parallel task, number of tasks) of a row kernel."""
    rows = row_domain(spec).rows
    chunk = max(1, min(decisions.chunk, rows)) if decisions.par else rows
    return chunk, -(-rows // chunk)


def scratch(spec: Graph, decisions: RowsDecisions[int]) -> tuple[BufferSpec, ...]:
    """One row of scratch per parallel task for every value kept between passes."""
    domain = row_domain(spec)
    tasks = row_tasks(spec, decisions)[1]
    return tuple(BufferSpec((tasks, domain.width), spec.nodes[k].dtype) for k in domain.kept_values)
