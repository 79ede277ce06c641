"""Writes what a bug report needs to ``debug_dir``: the graph, its kernels and how each runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.compiler.kernels import Choice
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
    place = Path(folder) / digest[:16]
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
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / "graph.json").write_text(json.dumps(graph.to_json()))
        (place / "kernels.json").write_text(json.dumps(kernels, indent=1))
    except OSError as err:
        log.warning("cannot write to debug_dir %s: %s", place, err)
