"""A results file that grows row by row, so that an interrupted run goes on where it stopped.

A row is kept as long as the package's code and the row's settings are the same; a measurement that
runs some parts of the package only names those.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from benchmarks import timing
from benchmarks.arguments import write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Plan(Protocol):
    """One row to produce."""

    @property
    def key(self) -> str:
        """Rows with equal keys answer the same question, whatever the code."""

    @property
    def settings(self) -> dict[str, Any]:
        """What besides the code must be equal for an old row to be kept."""


P = TypeVar("P", bound=Plan)


def portable(settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` without the caches' directories, which say where and not what was measured."""
    found = {name: settings[name] for name in ("options", "quick") if name in settings}
    return settings | {
        name: {k: v for k, v in options.items() if k != "cache_dir"}
        for name, options in found.items()
    }


def refresh(
    path: str,
    plans: Sequence[P],
    produce: Callable[[P], dict[str, Any]],
    *,
    force: bool,
    parts: Sequence[str] = ("torch_pruner",),
) -> dict[str, Any]:
    """Produces the rows that are missing or out of date; the file is written after each of them."""
    data = Path(path)
    content = json.loads(data.read_text()) if data.exists() else {"rows": {}}
    code = timing.code_identity(parts)
    for number, plan in enumerate(plans, start=1):
        old, settings = content["rows"].get(plan.key), portable(plan.settings)
        if old and not force and (old["code"], old["settings"]) == (code, settings):
            print(f"[{number}/{len(plans)}] {plan.key}: kept ({old['status']})")
            continue
        print(f"[{number}/{len(plans)}] {plan.key}: ...", end=" ", flush=True)
        machine = timing.machine()
        made = {"code": code, "commit": machine["commit"], "cpu": machine["cpu"]}
        row = produce(plan) | made | {"settings": settings}
        content["rows"][plan.key] = row
        content["machine"] = machine
        write_json(path, content)
        print(f"{row['status']} in {row['process_s']:.0f} s {row['error']}".rstrip())
    return content


def finish(content: dict[str, Any], path: str, table: str) -> int:
    """Writes the table beside the results and shows it. The exit status: 1 if a row failed."""
    Path(path).with_suffix(".md").write_text(table + "\n")
    print(table)
    return 0 if all(row["status"] == "ok" for row in content["rows"].values()) else 1
