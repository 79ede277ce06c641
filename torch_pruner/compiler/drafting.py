"""Schedules of least predicted latency, nothing measured: what runs until a search has looked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.compiler.company import in_company
from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.compiler.company import Ranked
    from torch_pruner.task import Task


def draft(task: Task) -> Candidate:
    """The schedule of least predicted latency of a kernel alone."""
    return drafts(task)[0][1]


def drafts(task: Task) -> Ranked:
    """The draft of every family, and its predicted latency in seconds; the least comes first."""
    found = []
    for sketch in families.sketches_for(task):
        point = sketch.default()
        predicted = float(sketch.symbols(point[None]).latency_s[0])
        decisions = tuple(sorted(sketch.named(point).items()))
        found.append((predicted, Candidate(sketch.name, decisions)))
    return sorted(found, key=lambda draft: draft[0])


def together(tasks: Sequence[Task]) -> dict[str, Candidate]:
    """The draft of each task in a program of all of them, by workload."""
    ranked = in_company(tasks, [drafts(task) for task in tasks])
    return {task.workload: found[0][1] for task, found in zip(tasks, ranked, strict=True)}
