"""What attention on a GPU leaves open."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

N = TypeVar("N")


class GpuAttentionDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    bm: N  # queries of a block
    bn: N  # keys of a turn
    stages: N  # turns whose keys shared memory holds at once
    ahead: N  # 1: copies are asynchronous where operands allow it
