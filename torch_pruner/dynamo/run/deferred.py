"""An ATen graph that eager runs until its program is there, and then its tuned program."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_pruner import log
from torch_pruner.background.queue import Job
from torch_pruner.dynamo.lower.calls import forwarded
from torch_pruner.dynamo.run import reports
from torch_pruner.dynamo.run.checked import may_draw
from torch_pruner.dynamo.run.first_call import FirstCall
from torch_pruner.log import PhaseTimer
from torch_pruner.report import GraphReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_pruner.config import Config
    from torch_pruner.dynamo.lower.calls import BoxedCall, RuntimeValue
    from torch_pruner.dynamo.run.finishing import Finishing
    from torch_pruner.dynamo.run.takeover import Takeover

_log = log.logger(__name__)


class _Rehearsal(threading.local):
    on = False


_rehearsal = _Rehearsal()


@contextmanager
def rehearsing() -> Iterator[None]:
    """In the block, this thread's calls go to what is to take over next."""
    _rehearsal.on = True
    try:
        yield
    finally:
        _rehearsal.on = False


@dataclass(frozen=True, slots=True)
class Stage:
    """A program to have: as ``config`` compiles it, and what the report calls it."""

    config: Config
    name: str


def stages_of(config: Config) -> list[Stage]:
    """First as drafted, then tuned, where that is asked for."""
    config = config.replace(compile="blocking", progress=False)
    drafted = Stage(config.replace(effort="none"), "drafted")
    if config.on_miss != "tune" or config.effort == "none":
        return [drafted]
    return [drafted, Stage(config, "tuned")]


class DeferredGraph(Job):
    """The call of an ATen graph, boxed. What runs in it changes between two calls.

    ``eager`` at first, then a program for each of ``stages_of(config)``, each from when its
    takeover calls ``promote``. Safe for several threads.
    """

    def __init__(
        self, finishing: Finishing, config: Config, eager: BoxedCall, takeover: Takeover
    ) -> None:
        # On the instance: torch wraps a backward and copies its __dict__ only.
        self._boxed_call = True
        graph, program = finishing.graph, finishing.program
        self.name = graph.label
        self.metadata = graph.metadata
        self.n_inputs = len(graph.example_inputs)
        self.draws = may_draw(graph.gm)
        self._finishing: Finishing | None = finishing
        self._strict, self.progress = config.strict, config.progress
        self._stages = stages_of(config)
        self._eager = self._current = eager
        self._candidate: BoxedCall | None = None
        self._now: BoxedCall = self._routed
        self._takeover = takeover
        self.loaded = False
        """Whether a program is there, or all hope is lost."""
        self.error: Exception | None = None
        """What ended it, to be raised by who waits."""
        self._report = GraphReport(
            self.name, program.ops_total, program.ops_compiled, program.flops_total,
            program.flops_compiled, len(program.regions), program.refused,
            seconds=dict(graph.timer.seconds), runs="eager", pending=self._stages[0].name,
        )  # fmt: skip
        reports.add(self._report)

    if TYPE_CHECKING:

        def __call__(self, args: list[RuntimeValue]) -> list[RuntimeValue]: ...

    else:
        __call__ = forwarded("_now")

    def _routed(self, args: list[RuntimeValue]) -> list[RuntimeValue]:
        candidate = self._candidate
        if not _rehearsal.on or candidate is None:
            return self._current(args)
        return candidate.rehearse(args) if isinstance(candidate, FirstCall) else candidate(args)

    @property
    def doing(self) -> str:  # type: ignore[override]
        stage = self._stages[0].name if self._stages else "nothing"
        return f"{self.name} is being {stage}, {self._report.runs or 'eager'} kernels run"

    @property
    def settled(self) -> bool:
        """Whether what is to take over has had its first call, or nothing is to."""
        candidate = self._candidate
        return not isinstance(candidate, FirstCall) or candidate.settled

    @property
    def compiled(self) -> bool:
        """Whether there is a program, which runs or is to take over."""
        return self._candidate is not None or self._current is not self._eager

    @property
    def finished(self) -> bool:
        """Whether what runs now, or is to take over, runs for good."""
        return self._finishing is None

    def promote(self) -> None:
        """From the next call on what is to take over runs."""
        if self._candidate is not None:
            self._current, self._candidate = self._candidate, None
            reports.renew(self._report)
        if self.finished:
            self._now = self._current

    def step(self) -> bool:
        """Have the next stage's program ready."""
        assert self._finishing is not None
        stage, timer = self._stages[0], PhaseTimer()
        finished = self._finishing.finished(stage.config, timer)
        del self._stages[
            0
        ]  # not before: a child that is forked while it waits begins the step anew
        pending = self._stages[0].name if self._stages else ""
        self._report = replace(finished.report, runs=stage.name, pending=pending)
        self._candidate, self.loaded = finished.call, True
        if not self._stages:
            self._finishing = None
        self._takeover.advance()
        return bool(self._stages)

    def failed(self, error: Exception) -> None:
        """What runs now runs for good."""
        self._stages.clear()
        self._finishing = None
        self.loaded = True
        kind = type(error).__name__
        if self._strict:
            self.error = error
        runs = self._report.runs if self._report.runs else "eager"
        note = f"not compiled: {kind}: {error}"
        self._report = replace(self._report, runs=runs, pending="", notes=(note,))
        reports.renew(self._report)
        _log.warning("%s stays as it is: %s: %s", self.name, kind, error)
        _log.debug("the failure", exc_info=error)
        self._takeover.advance()
