"""The nouns of tuning: what to tune, one way of doing it, what measuring it gave. Values only."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel to tune: a kernel graph on a target with a number of threads.

    ``weight`` is how often the captured graphs call the kernel, ``together`` how many of these
    calls a GPU does in one launch; they are no part of the identity.
    """

    name: str
    spec: Graph
    target: TargetSpec
    threads: int
    weight: int = 1
    together: int = 1

    @property
    def workload(self) -> str:
        return self.spec.digest()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sketch with every decision taken. ``trace`` is used by MetaSchedule's own space only."""

    sketch: str
    decisions: tuple[tuple[str, int], ...] = ()
    trace: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"sketch": self.sketch, "decisions": dict(self.decisions), "trace": self.trace}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Candidate:
        decisions = tuple(sorted((str(k), int(v)) for k, v in data["decisions"].items()))
        return Candidate(str(data["sketch"]), decisions, str(data.get("trace", "")))

    @property
    def digest(self) -> str:
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What the machine code of a kernel is made of, beside the target.

    ``past_caches``: what the kernel reads once leaves to others what is in the caches (decided by
    the graph that it is in, see ``graph.streamed``).
    """

    spec: Graph
    candidate: Candidate
    past_caches: bool = False


class MeasureStatus(StrEnum):
    OK = "ok"
    BUILD_ERROR = "build_error"
    RUN_ERROR = "run_error"
    TIMEOUT = "timeout"
    WRONG_RESULT = "wrong_result"


@dataclass(frozen=True, slots=True)
class MeasureInput:
    task: Task
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """What happened to one candidate. ``run_secs`` holds seconds per call, one per repeat.

    ``joules`` are those of a call, None where no meter was read.
    """

    candidate: Candidate
    status: MeasureStatus
    run_secs: tuple[float, ...] = ()
    error: str = ""
    joules: float | None = None

    @property
    def latency_s(self) -> float:
        """Median seconds per call; infinite for a candidate that failed."""
        return statistics.median(self.run_secs) if self.status is MeasureStatus.OK else math.inf
