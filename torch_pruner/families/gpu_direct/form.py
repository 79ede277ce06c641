"""What a product of one thread per element leaves open."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

N = TypeVar("N")


class GpuDirectDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    threads: N  # threads of a block
