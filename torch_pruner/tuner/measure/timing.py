"""Time a kernel: calibrate the number of calls of a repeat, repeat, stop early on a hopeless one.

Pure but for the calls it makes: the clock is handed in, so the arithmetic is tested with an
invented one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_pruner.tuner.measure.base import EvaluatorSpec

Call = Callable[[], object]
MAX_CALLS = 100_000
HOPELESS = 10.0  # one call this many times slower than the best is not worth a repeat


def _run(calls: Sequence[Call], number: int, clock: Callable[[], float]) -> float:
    """Seconds for ``number`` calls, taking ``calls`` in turn."""
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


def time_calls(
    calls: Sequence[Call],
    spec: EvaluatorSpec,
    best_s: float,
    clock: Callable[[], float],
    preemptions: Callable[[], int] = lambda: 0,
) -> tuple[float, ...]:
    """Seconds per call, one per repeat (fewer when the kernel is far from ``best_s``).

    ``preemptions`` counts how often another process has taken a core from this one.
    """
    for i in range(spec.warmup):
        calls[i % len(calls)]()
    limit = best_s * spec.early_out if spec.early_out > 0 else math.inf
    once = _run(calls, 1, clock)
    if once > max(limit / max(spec.early_out, 1.0) * HOPELESS, spec.min_repeat_s):
        return (once,)
    number = _calls_per_repeat(once, spec.min_repeat_s)
    before = preemptions()
    elapsed = _run(calls, number, clock)
    while elapsed < spec.min_repeat_s * 0.5 and number < MAX_CALLS:
        number = min(
            MAX_CALLS, max(2 * number, _calls_per_repeat(elapsed / number, spec.min_repeat_s))
        )
        before = preemptions()
        elapsed = _run(calls, number, clock)
    clean: list[float] = []
    disturbed: list[float] = []
    while True:
        (disturbed if preemptions() > before else clean).append(elapsed / number)
        done = len(clean) + len(disturbed)
        if len(clean) >= spec.repeat or done >= spec.repeat + spec.extra:
            break
        if min(*clean, *disturbed, math.inf) > limit and (clean or len(disturbed) >= spec.repeat):
            break
        before = preemptions()
        elapsed = _run(calls, number, clock)
    return tuple(clean or sorted(disturbed)[: spec.repeat])


def _calls_per_repeat(seconds: float, min_repeat_s: float) -> int:
    return min(MAX_CALLS, max(1, math.ceil(min_repeat_s / max(seconds, 1e-9))))
