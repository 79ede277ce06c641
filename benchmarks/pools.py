"""Everything measured of a task, as a pool that a search can be replayed in without measuring.

A replay asks a cost model which candidates of the pool it would measure next and tells it their
recorded times, so models are compared on the same data in seconds, with as many seeds as one likes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import records
from torch_pruner.families import sketches_for
from torch_pruner.task import MeasureStatus
from torch_pruner.tuner.cost_model.features import decisions_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import Candidate, MeasureResult, Task
    from torch_pruner.tuner.cost_model.base import CostModel

FIRST, BATCH = 4, 8  # candidates of the first and of every further turn
LEAST = 16  # records of a task that is used


@dataclass(frozen=True, slots=True)
class Pool:
    """A task, its sketches and everything that was measured of it."""

    task: Task
    sketches: Mapping[str, Sketch]
    results: Sequence[MeasureResult]
    earlier: Mapping[Candidate, MeasureResult] = field(default_factory=dict)  # see ``Measured``
    device: str = ""  # its name, for people
    digest: str = ""  # of its fingerprint

    @property
    def best_s(self) -> float:
        return min(r.latency_s for r in self.results)

    def scores(self, model: CostModel, results: Sequence[MeasureResult]) -> np.ndarray:
        found = np.zeros(len(results))
        for name, sketch in self.sketches.items():
            where = [i for i, r in enumerate(results) if r.candidate.sketch == name]
            if where:
                decisions = decisions_of(sketch, (results[i].candidate for i in where))
                found[where] = model.predict(self.task, sketch, decisions)
        return found


def workloads_of(path: str | None) -> set[str]:
    """Of the tasks that a file of benchmarks.search is about; none without a file."""
    rows = json.loads(Path(path).read_text())["rows"].values() if path else ()
    return {row["settings"]["workload"] for row in rows}


def load(paths: Iterable[Path]) -> tuple[list[Pool], int]:
    """The pools in files of records, and how many lines were damaged."""
    measured, damaged = records.read(paths)
    return [p for m in measured if (p := pool_of(m)) is not None], damaged


def pool_of(measured: records.Measured) -> Pool | None:
    """What of a task today's sketches still know; None where that is too little."""
    sketches = {s.name: s for s in sketches_for(measured.task)}
    known = []
    for result in measured.results:
        sketch = sketches.get(result.candidate.sketch)
        if sketch and set(dict(result.candidate.decisions)) == set(sketch.names):
            known.append(result)
    good = sum(r.status is MeasureStatus.OK for r in known)
    if good < LEAST:
        return None
    return Pool(
        measured.task, sketches, known, measured.earlier, measured.device_name, measured.device
    )


def replay(pools: Sequence[Pool], model: CostModel, seed: int, turns: int) -> list[list[float]]:
    """Seconds of the best found of each pool, trial by trial; tasks take turns with one model.

    ``model`` learns after every turn of a task. A list is shorter where a pool is used up.
    """
    rng = np.random.default_rng(seed)
    left = [[p.results[i] for i in rng.permutation(len(p.results))] for p in pools]
    found: list[list[float]] = [[] for _ in pools]
    for turn in range(turns):
        for k, pool in enumerate(pools):
            order = np.argsort(-pool.scores(model, left[k]), kind="stable")
            batch = [left[k][i] for i in order[: BATCH if turn else FIRST]]
            left[k] = [left[k][i] for i in order[len(batch) :]]
            model.update(pool.task, list(pool.sketches.values()), batch)
            for result in batch:
                found[k].append(min([*found[k][-1:], result.latency_s]))
    return found
