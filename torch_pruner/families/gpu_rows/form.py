"""What rows on a GPU leave open."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

N = TypeVar("N")


class GpuRowsDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    threads: N  # threads of a block, which has one row
