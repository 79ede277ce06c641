"""Searches that make room for requests: they rest while the process they are for is at work."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torch_pruner.tuner.measure.base import MeasureExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch_pruner.task import MeasureInput, MeasureResult

AT_WORK = 0.05  # of one core: who uses more is at work
REST = 3.0  # times as long as a batch took; requests beside a batch take a fifth longer at most
LOOK_S = 0.25  # between two looks at whether it still is at work
LOOKS = 4  # in a row that find it idle


def cpu_seconds(pid: int) -> float | None:
    """Seconds of processor time that a process has used, its threads included; None: not known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        used, in_kernel = text.rpartition(")")[2].split()[11:13]
        return (int(used) + int(in_kernel)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


class RestingExecutor(MeasureExecutor):
    """``inner``, which after each batch rests ``REST`` times as long if others were at work.

    ``used`` says how many seconds of processor time these have used; as long as that is not known,
    nothing rests. ``close`` closes ``inner``. What rests may be late by ``LOOK_S`` for the end that
    ``within`` sets.
    """

    def __init__(
        self,
        inner: MeasureExecutor,
        used: Callable[[], float | None],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner, self.evaluator, self.device = inner, inner.evaluator, inner.device
        self._used, self._sleep, self._clock = used, sleep, clock
        self._until = math.inf
        self._since = self._mark()

    def start(self) -> None:
        self.inner.start()

    def measure(self, inputs: Sequence[MeasureInput]) -> list[MeasureResult]:
        results = self.inner.measure(inputs)
        self._rest()
        return results

    def race(self, inputs: Sequence[MeasureInput]) -> list[MeasureResult]:
        results = self.inner.race(inputs)
        self._rest()
        return results

    @contextlib.contextmanager
    def within(self, seconds: float | None) -> Iterator[None]:
        self._until = math.inf if seconds is None else self._clock() + seconds
        try:
            with self.inner.within(seconds):
                yield
        finally:
            self._until = math.inf

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        return self.inner.phase_seconds

    def close(self) -> None:
        self.inner.close()

    def _mark(self) -> tuple[float, float | None]:
        return self._clock(), self._used()

    def _at_work(self, since: tuple[float, float | None]) -> bool:
        now, used = self._mark()
        if used is None or since[1] is None:
            return False
        return used - since[1] > AT_WORK * (now - since[0])

    def _rest(self) -> None:
        """Since the last rest it has worked, the search between batches included."""
        if self._at_work(self._since):
            end = min(self._until, self._clock() + REST * (self._clock() - self._since[0]))
            idle = 0
            while self._clock() < end and idle < LOOKS:
                before = self._mark()
                self._sleep(LOOK_S)
                idle = 0 if self._at_work(before) else idle + 1
        self._since = self._mark()
