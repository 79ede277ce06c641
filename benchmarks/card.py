"""The data card of trained weights: made by which command, from what, and how good they are.

In: pools of records and figures. Out: Markdown. Written beside the weights it speaks of.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from benchmarks import tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.pools import Pool

WIDTH = 100  # of a line of names
RECORDS = """\
Seconds of schedules of single kernels, no text, pictures or data of users. Inputs are random
numbers; parameters of the networks are random, too."""
JUDGED = """\
Each part of the tasks was held out once, and weights were trained on the others in the same way.
Top-k asks once, of the whole pool; best@n follows a search that learns: best of the pool over best
found."""


def render(pools: Sequence[Pool], weights: bytes, made: Mapping[str, str], figures: str) -> str:
    """``made`` says how, one line for each entry; ``figures`` is a Markdown table, or empty."""
    platforms: dict[tuple[str, ...], list[Pool]] = {}
    for pool in pools:
        task = pool.task
        kind = (pool.device, str(task.target.mcpu or task.target.kind), str(task.threads))
        platforms.setdefault(kind, []).append(pool)
    rows = [
        [*kind, str(len(own)), str(sum(len(p.results) for p in own))]
        for kind, own in sorted(platforms.items())
    ]
    lines = [f"* {name}: {value}" for name, value in made.items()]
    parts = [
        "# Data card",
        "\n".join([*lines, f"* SHA-256 of the file: `{hashlib.sha256(weights).hexdigest()}`"]),
        "## Records",
        RECORDS,
        tables.markdown(["device", "target", "threads", "tasks", "records"], rows),
        _wrapped(sorted({p.task.name for p in pools})),
    ]
    if figures:
        parts += ["## Judged on tasks that were held out", JUDGED, figures]
    return "\n\n".join(parts) + "\n"


def _wrapped(names: Sequence[str]) -> str:
    lines, line = [], "Tasks:"
    for at, name in enumerate(names):
        text = f" {name}" + ("." if at == len(names) - 1 else ",")
        if len(line) + len(text) > WIDTH:
            lines.append(line)
            line = text.strip()
        else:
            line += text
    return "\n".join([*lines, line])
