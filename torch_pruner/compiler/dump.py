"""Writes what a bug report needs to ``debug_dir``: the graph, its kernels and how each runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pruner.graph.phases import Turn
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.compiler.choice import Choice
    from torch_pruner.graph.ir import Graph
    from torch_pruner.task import Task

log = logger(__name__)


def dump_graph(
    folder: str, digest: str, graph: Graph, tasks: Sequence[Task], choices: Mapping[str, Choice]
) -> None:
    """Write ``graph.json`` and ``kernels.json`` to a directory named by ``digest``.

    Both are the IR's own JSON, which ``Graph.from_json`` reads back. A directory that cannot be
    written costs a warning, not the compilation.
    """
    kernels: list[dict[str, Any]] = [
        {
            "name": task.name,
            "workload": task.workload,
            "calls": task.weight,
            "spec": task.spec.to_json(),
            "source": choices[task.workload].source,
            "candidate": choices[task.workload].candidate.to_json(),
            "trials": choices[task.workload].trials,
        }
        for task in tasks
    ]
    _write(folder, digest, "graph.json", json.dumps(graph.to_json()))
    _write(folder, digest, "kernels.json", json.dumps(kernels, indent=1))


def dump_turns(
    folder: str, digest: str, workloads: Sequence[str], turns: Sequence[Turn] | None
) -> None:
    """Write ``turns.json``: every kernel of the program in order, its phase, and whether every
    thread repeats it or its prologue. Without ``turns`` a kernel is a phase of its own."""
    planned = turns if turns is not None else [Turn(k) for k in range(len(workloads))]
    rows = [{"workload": w} | asdict(turn) for w, turn in zip(workloads, planned, strict=True)]
    _write(folder, digest, "turns.json", json.dumps(rows, indent=1))


def _write(folder: str, digest: str, name: str, text: str) -> None:
    place = Path(folder) / digest[:16]
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    except OSError as err:
        log.warning("cannot write to debug_dir %s: %s", place, err)
