"""How one kernel runs, and what the report says of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_pruner.graph.describe import flops_of
from torch_pruner.report import Source, TaskReport
from torch_pruner.task import Candidate, Task

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen way to run a kernel. ``latency_s`` is infinite when it was never timed."""

    candidate: Candidate
    source: Source
    latency_s: float = math.inf
    before_s: float | None = None
    trials: int = 0
    effort: str = ""  # that its tuning was completed with; "" for one that is not tuned

    def to_json(self) -> dict[str, Any]:
        """For another process, which gets it back with ``from_json``."""
        timed = [finite(self.latency_s), self.before_s]
        return {"candidate": self.candidate.to_json(), "source": self.source, "timed": timed,
                "trials": self.trials, "effort": self.effort}  # fmt: skip

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Choice:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for what is no choice."""
        latency_s, before_s = data["timed"]
        return Choice(
            Candidate.from_json(data["candidate"]), data["source"],
            math.inf if latency_s is None else float(latency_s), before_s, int(data["trials"]),
            str(data["effort"]),
        )  # fmt: skip

    @property
    def sketch(self) -> str:
        return self.candidate.sketch

    @property
    def decisions(self) -> dict[str, int]:
        return dict(self.candidate.decisions)

    @property
    def digest(self) -> str:
        return self.candidate.digest


def report(task: Task, choice: Choice) -> TaskReport:
    """The report's line about a kernel."""
    return TaskReport(
        name=task.name,
        workload=task.workload,
        weight=task.weight,
        flops=flops_of(task.spec),
        source=choice.source,
        latency_before_s=choice.before_s,
        latency_after_s=finite(choice.latency_s),
        trials=choice.trials,
        digest=choice.digest,
        sketch=choice.sketch,
        effort=choice.effort,
    )


def finite(seconds: float) -> float | None:
    """None for what was never timed, since JSON has no infinity."""
    return seconds if math.isfinite(seconds) else None
