"""Decisions of kernels without a reduction."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

N = TypeVar("N")


class ElementwiseDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    chunk: N  # vectors of a parallel task
    par: N  # 1: tasks in parallel
