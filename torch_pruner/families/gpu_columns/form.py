"""What a window or a short reduction on a GPU leaves open."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

N = TypeVar("N")


class GpuColumnsDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    threads: N  # threads of a block
