"""Decisions of kernels in which each lane has a row of its own."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

N = TypeVar("N")


class LanePerRowDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: rows of one vector
    nv: N  # vectors of rows in a task
    par: N  # 1: tasks in parallel
