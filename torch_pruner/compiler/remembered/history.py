"""Tuning history: what was measured for a kernel before, so that nothing is measured twice.

In: the records of the store. Out: results and candidates as a tuning session wants them.

A record whose status is ``SEED`` was never measured here: it is a schedule from another device or
version, to be tried early.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from torch_pruner.cache import TuningRecord
from torch_pruner.task import Candidate, MeasureResult, MeasureStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch_pruner.cache import KernelKey, KernelStore
    from torch_pruner.pareto import Finalist

SEED = "seed"


def of(
    store: KernelStore, key: KernelKey, usable: Callable[[Candidate], bool]
) -> tuple[list[MeasureResult], list[Candidate]]:
    """(what was measured for ``key``, what is to be tried early), as far as ``usable`` here."""
    results, seeds = [], []
    for record in store.records(key):
        candidate = Candidate.from_json(record.candidate)
        if not usable(candidate):
            continue
        if record.status == SEED:
            seeds.append(candidate)
        else:
            status = MeasureStatus(record.status)
            results.append(MeasureResult(candidate, status, record.run_secs, record.error))
    return results, seeds


def measured(
    store: KernelStore, key: KernelKey, usable: Callable[[Candidate], bool]
) -> dict[Candidate, float]:
    """Seconds of every candidate that was measured for ``key``, and right: of several times the
    least."""
    found: dict[Candidate, float] = {}
    for result in of(store, key, usable)[0]:
        if result.status is MeasureStatus.OK:
            found[result.candidate] = min(result.latency_s, found.get(result.candidate, math.inf))
    return found


def progress(store: KernelStore, key: KernelKey) -> tuple[str, int]:
    """The effort that tuning ``key`` was completed with, and how many candidates were measured."""
    entry = store.get_kernel(key)
    measured = sum(record.status != SEED for record in store.records(key))
    if entry is None:
        return "", measured
    drafted = entry.source == "untuned" and entry.effort
    return "none" if drafted else entry.effort, max(entry.trials, measured)


def finalists(store: KernelStore, key: KernelKey) -> tuple[Finalist, ...]:
    """What is known of the schedules among which objectives choose."""
    entry = store.get_kernel(key)
    return () if entry is None else entry.finalists


def record_of(result: MeasureResult) -> TuningRecord:
    return TuningRecord(
        result.candidate.digest,
        result.candidate.to_json(),
        str(result.status),
        result.run_secs,
        result.error,
        time.time(),
    )


def seeds_of(candidates: Iterable[Candidate]) -> list[TuningRecord]:
    return [TuningRecord(c.digest, c.to_json(), SEED, time=time.time()) for c in candidates]
