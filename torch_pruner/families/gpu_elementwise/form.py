"""What a kernel without reductions on a GPU leaves open."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

N = TypeVar("N")


class GpuElementwiseDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # neighbouring elements of a thread
    threads: N  # threads of a block
