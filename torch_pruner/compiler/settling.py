"""What comes of a search: the fastest schedule of each kernel, the vendor's, or else the draft.

In: outcomes of a tuning session, and what was measured. Out: a ``Choice`` for every task.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.compiler.choice import Choice, finite
from torch_pruner.compiler.company import chosen_in_company
from torch_pruner.compiler.drafting import draft
from torch_pruner.compiler.vendor import wins, worth_vendor
from torch_pruner.families.library import FAMILY as LIBRARY
from torch_pruner.task import Candidate, MeasureInput, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.compiler.vendor import Vendor
    from torch_pruner.config import Config
    from torch_pruner.tuner.measure.base import MeasureExecutor
    from torch_pruner.tuner.task_run import TaskOutcome


def settled(
    tasks: Sequence[Task],
    found: Sequence[TaskOutcome | None],
    times: Sequence[Mapping[Candidate, float]],
    others: Sequence[Candidate],
    config: Config,
    executor: MeasureExecutor,
    vendor: Vendor | None,
) -> list[Choice]:
    """The choice of each task, for a program of all of them and ``others``.

    ``times`` are the seconds of each task's candidates, which were timed alone.
    """
    alone = [settle(t, f, config, executor, vendor) for t, f in zip(tasks, found, strict=True)]
    return chosen_in_company(alone, times, others)


def settle(
    task: Task,
    found: TaskOutcome | None,
    config: Config,
    executor: MeasureExecutor,
    vendor: Vendor | None,
) -> Choice:
    """The best measured schedule, the vendor's kernel if that is faster, or else the draft."""
    if found is None:
        return Choice(draft(task), "untuned")
    if found.best is None:
        return Choice(found.candidate or draft(task), "untuned", trials=found.trials)
    from torch_pruner.tuner.roofline import roofline_s

    best_s = found.best.latency_s
    # Timing the vendor's kernel costs up to half a second: not where it cannot win.
    possible = worth_vendor(task) and wins(roofline_s(task), best_s, task.threads)
    if vendor is not None and config.library and possible:
        vendor_s = vendor.latency_s(task.spec)
        if vendor_s is not None and wins(vendor_s, best_s, task.threads):
            # Ours was timed at another moment, perhaps a busier one: both once more, side by side.
            again = executor.race([MeasureInput(task, found.best.candidate)])[0]
            best_s = min(best_s, again.latency_s)
            vendor_s = min(vendor_s, vendor.latency_s(task.spec) or math.inf)
            if wins(vendor_s, best_s, task.threads):
                before_s = finite(best_s)
                return Choice(Candidate(LIBRARY.name), "library", vendor_s, before_s, found.trials)
    return Choice(found.best.candidate, "tuned", best_s, finite(found.first_s), found.trials)
