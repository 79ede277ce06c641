"""Kernels that share a program: its threads are there already.

Estimates of a kernel that threads share count starting and joining them, and so do its times, since
it is timed alone. The kernels of a program are one launch; in it such a kernel costs that threads
meet, and that each finds what the others wrote in their caches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.families import machine
from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch_pruner.compiler.choice import Choice
    from torch_pruner.families.space import Decisions, Mask, Sketch
    from torch_pruner.task import Task

# Of 1, 2 and 5 us it was the best for MobileNet-V2 and RegNet-Y (docs/experiments.md).
SHARED_S = 2e-6

Ranked = list[tuple[float, Candidate]]


def in_company(
    tasks: Sequence[Task], drafts: Sequence[Ranked], others: Collection[Candidate] = ()
) -> list[Ranked]:
    """``drafts`` of ``tasks``, the best first, for a program of these kernels and ``others``.

    A draft is predicted seconds and a candidate. Where threads are started for any kernel of
    several, the best schedule for all threads comes before one for a single thread that is expected
    to take longer.
    """
    if not _are_launched([*others, *(ranked[0][1] for ranked in drafts)]):
        return list(drafts)
    return [_beside(task, ranked) for task, ranked in zip(tasks, drafts, strict=True)]


def chosen_in_company(
    choices: Sequence[Choice],
    measured: Sequence[Mapping[Candidate, float]],
    others: Collection[Candidate] = (),
) -> list[Choice]:
    """``choices`` that searches made, for a program of these kernels and ``others``.

    ``measured`` are the seconds of each kernel's candidates alone. Where threads are started for
    any kernel of several, the fastest schedule for all threads takes the place of one for a single
    thread that takes longer in a program.
    """
    if not _are_launched([*others, *(choice.candidate for choice in choices)]):
        return list(choices)
    return [_instead(choice, found) for choice, found in zip(choices, measured, strict=True)]


def _instead(choice: Choice, measured: Mapping[Candidate, float]) -> Choice:
    if choice.source != "tuned" or not _is_serial(choice.candidate):
        return choice
    shared = {c: s for c, s in measured.items() if _is_shared(c)}
    best = min(shared, key=lambda c: shared[c], default=None)
    if best is None or shared[best] - machine.LAUNCH_S + SHARED_S >= choice.latency_s:
        return choice
    return replace(choice, candidate=best, latency_s=shared[best])


def _are_launched(candidates: Sequence[Candidate]) -> bool:
    """Whether these are a program of several kernels whose threads are started for one of them."""
    return len(candidates) > 1 and not all(_is_serial(candidate) for candidate in candidates)


def _beside(task: Task, ranked: Ranked) -> Ranked:
    seconds, first = ranked[0]
    if task.threads == 1 or not _is_serial(first):
        return ranked
    (sketch,) = (s for s in families.sketches_for(task) if s.name == first.sketch)
    if "par" not in sketch.names or (point := _shared(sketch)) is None:
        return ranked
    alone_s = float(sketch.symbols(point[None]).latency_s[0])
    if alone_s - machine.LAUNCH_S + SHARED_S >= seconds:
        return ranked
    candidate = Candidate(sketch.name, tuple(sorted(sketch.named(point).items())))
    return [(alone_s, candidate), *ranked]


def _shared(sketch: Sketch) -> Decisions | None:
    at = sketch.names.index("par")

    def allowed(points: Decisions) -> Mask:
        found: Mask = points[:, at] == 1
        return found

    return sketch.best_within(allowed)


def _is_shared(candidate: Candidate) -> bool:
    return families.named(candidate.sketch).generated and not _is_serial(candidate)


def _is_serial(candidate: Candidate) -> bool:
    family = families.named(candidate.sketch)
    return family.generated and family.serial(dict(candidate.decisions))
