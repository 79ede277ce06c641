"""What an executor knows of its workers and of the candidates they are busy with."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.task import MeasureInput, MeasureResult, MeasureStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.tuner.measure.process import WorkerProcess


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a step may take before its worker is killed."""

    start_s: float = 120.0
    task_s: float = 120.0
    build_s: float = 20.0
    run_s: float = 10.0


@dataclass(slots=True)
class WorkerState:
    """A worker process, what it knows and what it owes answers for."""

    process: WorkerProcess
    ready: bool = False
    tasks: set[str] = field(default_factory=set)
    owes: deque[str | int] = field(default_factory=deque)  # task names and job numbers, in order
    built: list[int] = field(default_factory=list)
    ran: set[int] = field(default_factory=set)  # jobs called once, whose times are owed
    since: float = 0.0


@dataclass(slots=True)
class Batch:
    """The jobs of one ``measure`` call and their results so far."""

    inputs: Sequence[MeasureInput]
    names: list[str]
    results: dict[int, MeasureResult] = field(default_factory=dict)
    queue: deque[int] = field(default_factory=deque)
    lost: Counter[int] = field(default_factory=Counter)
    race: int = 0

    def settle(self, job: int, status: MeasureStatus, error: str) -> None:
        candidate = self.inputs[job].candidate
        self.results[job] = MeasureResult(candidate, status, (), error)
