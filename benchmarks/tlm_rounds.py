"""The generator's rounds (TLM, OSDI 2024): what it writes is measured, the best of it learned.

A round writes some schedules of every task that this machine may measure, times them, and trains on
the best of all that is known by then. Times of two moments are on no one scale, so the best known
of a task is timed with its new ones, and they are told in its earlier seconds.

The paper overlaps both: while a round is measured it trains on the one before, so that what a round
taught is written two rounds later. ``overlap`` does that; it is for devices that are not the
processor which trains, whose timings training would spoil.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks import records
from benchmarks.tlm_learning import Known, best_points, taught
from torch_pruner.task import MeasureInput, MeasureStatus
from torch_pruner.tuner.search.tlm import TLMSearch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

    from torch_pruner.task import Candidate, MeasureResult
    from torch_pruner.tuner.generator.model import Generator
    from torch_pruner.tuner.measure.base import MeasureExecutor


@dataclass(frozen=True, slots=True)
class Plan:
    """How many ``rounds`` of so many ``written`` schedules a task; ``steps`` of training in each.

    ``out``: a file of records that gets what is measured, as it was timed.
    """

    rounds: int
    written: int
    steps: int
    overlap: bool = False
    out: Path | None = None


def improved(
    generator: Generator,
    known: Sequence[Known],
    mine: Sequence[bool],
    executor: MeasureExecutor,
    plan: Plan,
    rng: np.random.Generator,
) -> tuple[list[Known], list[list[float]]]:
    """All that is known after the rounds, and of each round what each task gained: the best known
    before over the best of the round.

    ``mine[i]``: whether this machine may measure task ``i``. ``generator`` is trained in place.
    """
    known, gains = list(known), list[list[float]]()
    where = [i for i, own in enumerate(mine) if own]

    def measured(asked: Sequence[list[Candidate]]) -> list[list[MeasureResult]]:
        return [_timed(known[i], a, executor, plan) for i, a in zip(where, asked, strict=True)]

    def noted(found: Sequence[list[MeasureResult]]) -> None:
        gained = []
        for i, results in zip(where, found, strict=True):
            best_s = min((r.latency_s for r in results), default=math.inf)
            gained.append(known[i].best_s / best_s)
            known[i] = _with(known[i], results)
        gains.append(gained)

    def learn() -> None:
        taught(generator, known, best_points, plan.steps, rng)

    with ThreadPoolExecutor(1) as measuring:
        for number in range(plan.rounds):
            asked = [_written(generator, known[i], plan.written, rng) for i in where]
            now = measuring.submit(measured, asked)
            if plan.overlap and number:  # of the round before, whose points are known already
                learn()
            noted(now.result())
            if not plan.overlap:
                learn()
    if plan.overlap and plan.rounds:
        learn()
    return known, gains


def _written(
    generator: Generator, known: Known, n: int, rng: np.random.Generator
) -> list[Candidate]:
    search = TLMSearch(generator)
    sketches = list(known.pool.sketches.values())
    search.start(known.pool.task, sketches, rng=rng, history=known.pool.results)
    return search.propose(n)


def _timed(
    known: Known, asked: Sequence[Candidate], executor: MeasureExecutor, plan: Plan
) -> list[MeasureResult]:
    """What worked of ``asked``, in the seconds of the records; nothing where the best no longer
    does."""
    task = known.pool.task
    good = [r for r in known.pool.results if r.status is MeasureStatus.OK]
    best = min(good, key=lambda r: r.latency_s)
    again, *found = executor.measure([MeasureInput(task, c) for c in (best.candidate, *asked)])
    if plan.out is not None:
        lines = [records.result_line(task, executor.device, r) for r in (again, *found)]
        records.append(plan.out, [records.task_line(task, executor.device), *lines])
    if again.status is not MeasureStatus.OK:
        return []
    scale = best.latency_s / again.latency_s
    return [
        replace(r, run_secs=tuple(s * scale for s in r.run_secs))
        for r in found
        if r.status is MeasureStatus.OK
    ]


def _with(known: Known, results: Sequence[MeasureResult]) -> Known:
    if not results:
        return known
    return Known.of(replace(known.pool, results=[*known.pool.results, *results]))
