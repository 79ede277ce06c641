"""The state of an executor: its workers, and the candidates they are busy with."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.task import MeasureInput, MeasureResult, MeasureStatus, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.tuner.measure.process import WorkerProcess
    from torch_pruner.tuner.measure.protocol import Message

GROUP_BYTES = 256 << 20  # of operands of candidates that are timed side by side


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
    anchors: dict[int, bool] = field(default_factory=dict)  # asked for: whether each was built
    slower: float = 1.0  # than the machine was: by what the times of the present group are divided
    since: float = 0.0


@dataclass(slots=True)
class MeasureBatch:
    """The jobs of one ``measure`` call and their results so far."""

    inputs: Sequence[MeasureInput]
    names: list[str]
    results: dict[int, MeasureResult] = field(default_factory=dict)
    queue: deque[int] = field(default_factory=deque)
    lost: Counter[int] = field(default_factory=Counter)
    race: int = 0

    def worked(self, job: int) -> bool:
        """Whether a job has a time."""
        return job in self.results and self.results[job].status is MeasureStatus.OK

    def settle(self, job: int, status: MeasureStatus, error: str) -> None:
        candidate = self.inputs[job].candidate
        self.results[job] = MeasureResult(candidate, status, (), error)


def groups(batch: MeasureBatch, jobs: Sequence[int], flush_bytes: int) -> list[list[int]]:
    """Jobs of one task side by side, as far as memory goes; alone, if workers died with it."""
    found: list[list[int]] = []
    room = 0
    for job in jobs:
        last = found[-1][-1] if found else job
        alone = batch.lost[job] or batch.lost[last]
        if last == job or alone or room <= 0 or batch.names[job] != batch.names[last]:
            spec = batch.inputs[job].task.spec
            operands = sum(n.numel * ITEMSIZE[n.dtype] for n in spec.nodes if not n.inputs)
            room = GROUP_BYTES // max(operands, flush_bytes, 1) - 1  # for the task's anchor
            found.append([])
        found[-1].append(job)
        room -= 1
    return found


def families_message() -> Message:
    """What a worker is told before a task: the families that are not the package's own."""
    return {"cmd": "families", "families": families.own_sources()}


def task_message(name: str, task: Task, seed: int) -> Message:
    """The message that defines a task to a worker."""
    return {
        "cmd": "task",
        "task": name,
        "spec": task.spec.to_json(),
        "target": task.target.to_json(),
        "threads": task.threads,
        "seed": seed,
    }
