"""The option ``objective``: which of the schedules that are as fast as the fastest runs.

An entry of the cache has the schedule that latency chooses, and the finalists of its search with
what they cost. So one search serves every objective, as far as it has measured what that one asks
for, and the objective is no part of a key: it is a choice among what is known, made anew in every
process. What is not known is a miss: an entry without finalists, which an earlier version wrote,
serves ``latency`` alone, and one whose finalists nobody has metered does not serve ``energy``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner import families
from torch_pruner.families.footprint import footprint_of
from torch_pruner.pareto import LATENCY, TIE, Finalist, Objective, as_fast, non_dominated
from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch_pruner.cache import KernelEntry
    from torch_pruner.compiler.choice import Choice
    from torch_pruner.config import Config
    from torch_pruner.families.space import Sketch
    from torch_pruner.pareto import Footprint
    from torch_pruner.task import Task

    Usable = Callable[[Candidate], bool]

MOST_NEAR = 64  # points of a sketch, near its draft, whose memory is asked for


def objective_of(config: Config) -> Objective:
    """The objective of ``config``. Under ``weights="frozen"`` originals may be freed."""
    return Objective(config.objective, config.weights == "frozen")


def footprint(task: Task, candidate: Candidate) -> Footprint:
    """What a kernel needs in memory, for a session of the tuner."""
    return footprint_of(task.spec, candidate)


def lacks(entry: KernelEntry, config: Config) -> str:
    """What a complete entry does not know that the objective has to; "" if it has all.

    Where an untuned kernel may run, what is known will do. So it does where nothing is to be
    measured: a tuned kernel is better than a draft, and of drafts no meter knows anything.
    """
    wanted = objective_of(config)
    measured = wanted.metered or entry.source != "untuned"
    if config.on_miss == "fallback" or (config.effort == "none" and measured):
        return ""
    if wanted.name == LATENCY.name:
        return ""
    if not entry.finalists:
        return "what its schedules need in memory was not noted"
    return "" if wanted.decides(entry.finalists) else "the energy of its schedules was not measured"


def preferred(
    choice: Choice, finalists: Iterable[Finalist], task: Task, config: Config, usable: Usable
) -> Choice:
    """``choice``, which latency made, or in its place the finalist that the objective takes.

    Of a graph in which the kernel is called ``task.weight`` times. What nobody has timed keeps its
    infinite latency.
    """
    wanted = objective_of(config)
    known = [f for f in finalists if usable(f.candidate)]
    if wanted.name == LATENCY.name or not known or not wanted.decides(known):
        return choice
    taken = wanted.choose(known, task.weight)
    latency_s = taken.latency_s if math.isfinite(choice.latency_s) else choice.latency_s
    return replace(choice, candidate=taken.candidate, latency_s=latency_s)


def alone(task: Task, choice: Choice) -> tuple[Finalist, ...]:
    """The finalists where there is nothing to choose from."""
    return (Finalist(choice.candidate, choice.latency_s, footprint(task, choice.candidate)),)


def of_drafts(
    task: Task, taken: Choice, drafts: Sequence[tuple[float, Candidate]], config: Config
) -> tuple[Finalist, ...]:
    """What may run in place of ``taken``, with predicted latencies; none where only these count.

    What was tuned for a kernel like this one is not a draft, and nothing is in its place.
    """
    if config.objective != "memory":
        return ()
    return drafted(task, drafts) if taken.candidate == drafts[0][1] else alone(task, taken)


def drafted(task: Task, drafts: Sequence[tuple[float, Candidate]]) -> tuple[Finalist, ...]:
    """Schedules predicted to be as fast as the first of ``drafts``, by their predicted seconds.

    Those are drafts of other families, and schedules that differ from a draft in one decision:
    in the width of packed panels, say, and so in their padding.
    """
    limit = TIE * drafts[0][0]
    found: dict[Candidate, float] = {}
    sketches = {sketch.name: sketch for sketch in families.sketches_for(task)}
    for seconds, candidate in drafts:
        if seconds <= limit:
            found[candidate] = seconds
            found |= _near(sketches[candidate.sketch], candidate, limit)
    near = as_fast([Finalist(c, s, footprint(task, c)) for c, s in found.items()])
    return non_dominated(near)


def _near(sketch: Sketch, draft: Candidate, limit_s: float) -> dict[Candidate, float]:
    """Predicted seconds, at most ``limit_s``, of schedules one decision away from ``draft``."""
    taken = dict(draft.decisions)
    point = np.array([taken[name] for name in sketch.names], dtype=np.int64)
    moved = [
        np.concatenate([point[:k], [option], point[k + 1 :]])
        for k, options in enumerate(sketch.domains)
        for option in options
        if option != point[k]
    ]
    if not moved:
        return {}
    points = np.stack(moved)
    points = points[sketch.valid(points)]
    if not len(points):
        return {}
    seconds = sketch.symbols(points).latency_s
    order = [i for i in np.argsort(seconds, kind="stable")[:MOST_NEAR] if seconds[i] <= limit_s]
    return {_candidate(sketch, points[i]): float(seconds[i]) for i in order}


def _candidate(sketch: Sketch, point: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Candidate:
    return Candidate(sketch.name, tuple(sorted(sketch.named(point).items())))
