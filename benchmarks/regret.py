"""How good a ranking's favourite is among what was measured of a task: the arithmetic of ``zero``.

Records outlive the spaces that they were made in, and clocks of virtual machines sometimes lie.
Here is what of a task's records today's spaces can still choose, and what of that can be believed.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.pools import LEAST, Pool
from torch_pruner.families import sketches_for
from torch_pruner.task import MeasureResult, MeasureStatus
from torch_pruner.tuner.cost_model.features import decisions_of
from torch_pruner.tuner.roofline import roofline_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks.records import Measured
    from torch_pruner.families.space import Sketch
    from torch_pruner.task import Candidate

USABLE = "usable"
GONE, OTHER, OUTSIDE = "family gone", "other decisions", "not in the space"
FAILED, UNBELIEVABLE = "failed", "faster than can be"
# Seconds below this share of the bound cannot be: of 119 tasks the best ones are at 0.79 and more
# (the bound counts with a frequency that clocks exceed), and those of one task at 0.43.
BELIEVABLE = 0.77
# Second times over first ones of the same points, in the median: beyond that the machine was
# another one in between, and only first times of all points are on one scale.
SHIFTED = 1.25


@dataclass(frozen=True, slots=True)
class Usable:
    """A task's results that count today, None for fewer than ``LEAST``, and how many of each kind
    there are.
    """

    pool: Pool | None
    states: Counter[str]


def usable(measured: Measured) -> Usable:
    """What of a task's records today's spaces hold, and of that what worked and can be believed.

    A result that is faster than can be gives way to the first one of the same candidate, if that
    can be.
    """
    sketches = {s.name: s for s in sketches_for(measured.task)}
    least_s = BELIEVABLE * roofline_s(measured.task)
    states: Counter[str] = Counter()
    kept: list[MeasureResult] = []
    results = on_one_scale(measured.results, measured.earlier)
    for result, state in zip(results, _states(results, sketches), strict=True):
        if state == USABLE:
            found = _believed(result, measured.earlier, least_s)
            if result.status is not MeasureStatus.OK:
                state = FAILED
            elif found is None:
                state = UNBELIEVABLE
            else:
                kept.append(found)
        states[state] += 1
    if len(kept) < LEAST:
        return Usable(None, states)
    earlier, name = measured.earlier, measured.device_name
    return Usable(Pool(measured.task, sketches, kept, earlier, name), states)


def on_one_scale(
    results: Sequence[MeasureResult], earlier: Mapping[Candidate, MeasureResult]
) -> list[MeasureResult]:
    """The results, or the first ones where second ones are from a machine of another speed."""
    both = [(r, earlier[r.candidate]) for r in results if r.candidate in earlier]
    shift = [
        math.log(second.latency_s / first.latency_s)
        for second, first in both
        if first.status is second.status is MeasureStatus.OK
    ]
    if not shift or abs(float(np.median(shift))) <= math.log(SHIFTED):
        return list(results)
    return [earlier.get(r.candidate, r) for r in results]


def _believed(
    result: MeasureResult, earlier: Mapping[Candidate, MeasureResult], least_s: float
) -> MeasureResult | None:
    if result.latency_s >= least_s:
        return result
    first = earlier.get(result.candidate)
    return first if first is not None and first.latency_s >= least_s else None


def _states(results: Sequence[MeasureResult], sketches: Mapping[str, Sketch]) -> list[str]:
    """Of every result, whether its point is one of today's."""
    states = [GONE] * len(results)
    for name, sketch in sketches.items():
        own = [i for i, r in enumerate(results) if r.candidate.sketch == name]
        known = []
        for i in own:
            same = set(dict(results[i].candidate.decisions)) == set(sketch.names)
            states[i] = OUTSIDE if same else OTHER
            known += [i] if same else []
        if known:
            points = decisions_of(sketch, (results[i].candidate for i in known))
            options = zip(points.T, sketch.domains, strict=True)
            inside = np.all([np.isin(column, domain) for column, domain in options], axis=0)
            inside[inside] = sketch.valid(points[inside])
            for i, good in zip(known, inside, strict=True):
                states[i] = USABLE if good else OUTSIDE
    return states


def top1(latency_s: Sequence[float] | np.ndarray, scores: Sequence[float] | np.ndarray) -> float:
    """The least latency over that of the point of highest score, the first of equals: 1 is best."""
    latency = np.asarray(latency_s, dtype=np.float64)
    return float(latency.min() / latency[int(np.argmax(np.asarray(scores)))])


def by_chance(latency_s: Sequence[float] | np.ndarray) -> float:
    """What a point drawn at random reaches of the best, in geometric mean over all draws."""
    return geometric_mean(min(latency_s) / s for s in latency_s)


def geometric_mean(ratios: Iterable[float]) -> float:
    """Of positive numbers; nan for none."""
    logarithms = [math.log(r) for r in ratios]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan


def first_times(pool: Pool) -> Pool | None:
    """The results that were measured twice, if there are some: see ``once``."""
    twice = [r for r in pool.results if pool.earlier.get(r.candidate, r) is not r]
    return replace(pool, results=twice) if len(twice) > 1 else None


def once(pool: Pool) -> float | None:
    """What the best by first times reaches by second ones: no ranking can be expected to do more.

    Of the candidates that were measured twice, which are the best ones; None without any.
    """
    twice = first_times(pool)
    if twice is None:
        return None
    latency = [r.latency_s for r in twice.results]
    return top1(latency, [-pool.earlier[r.candidate].latency_s for r in twice.results])
