"""Decisions of products that add up rows of their second operand."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

N = TypeVar("N")


class AxpyDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    ku: N  # rows of the second operand that are added together
    cv: N  # vectors of columns in a task
    ahead: N  # 1: the rows that are next are fetched
    par: N  # 1: tasks in parallel
