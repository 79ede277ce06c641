"""Time kernels in turns: calibrate the calls of a repeat, repeat, stop early on a hopeless one.

Pure but for the calls it makes: the clock is handed in, so the arithmetic is tested with an
invented one.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_pruner.tuner.measure.base import EvaluatorSpec

Call = Callable[[], object]
MAX_CALLS = 100_000
HOPELESS = 10.0  # one call this many times slower than the best is not worth a repeat
LEAST = 0.05  # of what was timed: what is left for the kernel, however long its reader took
READINGS = 20


@dataclass(slots=True)
class Reading:
    """What reading a task's results takes where they lie near: the least seen so far, in seconds.

    Shared by all candidates of a task. A slow moment is longer than a few readings in a row, and
    what one adds to the figure is taken off a kernel that ran in a fast one.
    """

    seconds: float = math.inf

    def take(self, after: Call, clock: Callable[[], float]) -> None:
        for _ in range(READINGS):
            begin = clock()
            after()
            self.seconds = min(self.seconds, clock() - begin)


@dataclass(frozen=True, slots=True)
class CallContext:
    """The calls around every timed call, in place of the kernels before and after it.

    ``before`` is not timed. ``after`` is: it reads the results, as the kernel after would, and what
    that takes when they lie near, ``reading``, is taken off again.
    """

    before: Call
    after: Call
    reading: Reading

    def net_s(self, per_call_s: float) -> float:
        """Of the seconds of a call and of ``after``, the call's."""
        return max(per_call_s - self.reading.seconds, LEAST * per_call_s)


def _run(
    calls: Sequence[Call],
    number: int,
    clock: Callable[[], float],
    context: CallContext | None = None,
) -> float:
    """Seconds for ``number`` calls, taking ``calls`` in turn, each in its ``context``, if any."""
    if context is not None:
        context.reading.take(context.after, clock)
        total = 0.0
        for call in itertools.islice(itertools.cycle(calls), number):
            context.before()
            begin = clock()
            call()
            context.after()
            total += clock() - begin
        return total
    if len(calls) == 1:
        call = calls[0]
        begin = clock()
        for _ in range(number):
            call()
        return clock() - begin
    order = list(itertools.islice(itertools.cycle(calls), number))
    begin = clock()
    for call in order:
        call()
    return clock() - begin


class Stopwatch:
    """Times one kernel repeat by repeat, so that several can take turns.

    ``preemptions`` counts how often another process has taken a core from this one; every call
    runs in its ``context``. ``device`` runs calls and tells their seconds by a clock of
    its own, if it has one.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        spec: EvaluatorSpec,
        best_s: float,
        clock: Callable[[], float],
        preemptions: Callable[[], int] = lambda: 0,
        context: CallContext | None = None,
        device: Callable[[Sequence[Call], int], float | None] = lambda calls, number: None,
    ) -> None:
        self._calls, self._spec, self._clock, self._preemptions = calls, spec, clock, preemptions
        self._context, self._device = context, device
        self._limit = best_s * spec.early_out if spec.early_out > 0 else math.inf
        self._clean: list[float] = []
        self._disturbed: list[float] = []
        self._number = 0
        self.done = False

    @property
    def run_secs(self) -> tuple[float, ...]:
        """Seconds per call, one per repeat (fewer when the kernel is far from ``best_s``)."""
        return tuple(map(self._net_s, self._clean or sorted(self._disturbed)[: self._spec.repeat]))

    def _net_s(self, per_call_s: float) -> float:
        return per_call_s if self._context is None else self._context.net_s(per_call_s)

    def repeat(self) -> None:
        """One more repeat; the first finds out how many calls a repeat takes."""
        if not self._number and not self._calibrate():
            return
        self._calls[0]()  # what ran before has taken the caches
        before = self._preemptions()
        self._note(self._timed(self._number), before)

    def _calibrate(self) -> bool:
        """Whether repeats are worth it: a call far slower than the best is all it gets."""
        spec = self._spec
        for i in range(spec.warmup):
            self._calls[i % len(self._calls)]()
        once = self._timed(1)
        if once > max(self._limit / max(spec.early_out, 1.0) * HOPELESS, spec.min_repeat_s):
            self._clean, self.done = [once], True
            return False
        number = _calls_per_repeat(once, spec.min_repeat_s)
        while number < MAX_CALLS:
            elapsed = number * self._net_s(self._timed(number) / number)
            if elapsed >= spec.min_repeat_s * 0.5:
                break
            number = max(2 * number, _calls_per_repeat(elapsed / number, spec.min_repeat_s))
        self._number = min(MAX_CALLS, number)
        return True

    def _timed(self, number: int) -> float:
        seconds = self._device(self._calls, number)
        return _run(self._calls, number, self._clock, self._context) if seconds is None else seconds

    def _note(self, elapsed: float, before: int) -> None:
        kind = self._disturbed if self._preemptions() > before else self._clean
        kind.append(elapsed / self._number)
        spec, done = self._spec, len(self._clean) + len(self._disturbed)
        if len(self._clean) >= spec.repeat or done >= spec.repeat + spec.extra:
            self.done = True
        elif self._net_s(min(*self._clean, *self._disturbed, math.inf)) > self._limit:
            self.done = bool(self._clean) or len(self._disturbed) >= spec.repeat


class AtTwoSizes:
    """A kernel of which less may count than it has room for, timed with all of it and with less.

    Both weigh alike: seconds per call are those with all, times the root of how much longer it
    takes with less than the ``best`` does, which is as fast as any at both.
    """

    def __init__(self, most: Stopwatch, less: Stopwatch) -> None:
        self._most, self._less = most, less
        self.best: tuple[float, float] | None = None

    @property
    def done(self) -> bool:
        return self._most.done and self._less.done

    @property
    def run_secs(self) -> tuple[float, ...]:
        """See ``Stopwatch.run_secs``."""
        most, less = self.best or self.seconds
        pairs = zip(self._most.run_secs, self._less.run_secs, strict=False)
        return tuple(math.sqrt(a * b * most / less) for a, b in pairs)

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds per call with all that may count, and with less."""
        return statistics.median(self._most.run_secs), statistics.median(self._less.run_secs)

    def repeat(self) -> None:
        for watch in (self._most, self._less):
            if not watch.done:
                watch.repeat()


def time_together(watches: Sequence[Stopwatch | AtTwoSizes]) -> None:
    """Let kernels take turns until each has its repeats: a slow moment hits all of them."""
    while running := [w for w in watches if not w.done]:
        for watch in running:
            watch.repeat()


def _calls_per_repeat(seconds: float, min_repeat_s: float) -> int:
    return min(MAX_CALLS, max(1, math.ceil(min_repeat_s / max(seconds, 1e-9))))
