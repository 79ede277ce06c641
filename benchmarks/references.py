"""MetaSchedule's searches of an earlier run, taken over where another run of them says nothing new.

A thousand trials take five to ten minutes a task, and nothing of ours is in them. What they found
is timed once more, in turns with what a search finds now, so a figure that says how good results
are is of the present code. A figure that says how *soon* they came is not: that needs both searches
in one run, on a machine whose speed changes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks.timing import code_identity

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

REFERENCE = "metaschedule"
KEPT = "kept_from"  # of a search: the commit at which it ran
# What MetaSchedule's searches run of ours: its driver, how tasks are written for it, how candidates
# are built and timed.
PARTS = (
    "benchmarks/stock_search.py",
    *(f"torch_pruner/{part}" for part in ("families/metaschedule", "tuner/measure")),
    *(f"torch_pruner/tuner/search/{part}.py" for part in ("_tvm", "metaschedule")),
)


def of_row(
    content: Mapping[str, Any], key: str, settings: Mapping[str, Any], machine: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The reference's searches in an earlier row of ``content``, each with its best candidate.

    Empty where there is no such row, or where the task, the trials, the seeds, the machine, TVM or
    the code that drives it (``PARTS``) are others.
    """
    row = content["rows"].get(key)
    if not row or row["status"] != "ok" or _asked(row["settings"]) != _asked(settings):
        return []
    if row["cpu"] != machine["cpu"] or _versions(content["machine"]) != _versions(machine):
        return []
    found = [s for s in row["searches"] if s["search"] == REFERENCE]
    commits = {s.get(KEPT, row["commit"]) for s in found}
    if any(code_identity(PARTS, commit) != code_identity(PARTS) for commit in commits):
        return []
    return [{**s, KEPT: s.get(KEPT, row["commit"])} for s in found]


def write(searches: list[dict[str, Any]], path: Path) -> str:
    """Leave them in a file for the process that times the row: its name, "" if there are none."""
    if not searches:
        return ""
    path.write_text(json.dumps(searches))
    return str(path)


def _asked(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    trials = settings.get("reference_trials") or settings["trials"]
    names = ("workload", "threads", "reference_seeds")
    return (trials, *(settings[name] for name in names))


def _versions(machine: Mapping[str, Any]) -> tuple[Any, ...]:
    return machine["cores"], machine["versions"].get("apache-tvm")
