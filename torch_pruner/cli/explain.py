"""``torch-pruner explain MODEL``: what would be compiled, and why not the rest. Tunes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pruner.cli import arguments, model, page
from torch_pruner.text_tables import flops_text, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from torch_pruner.dynamo.api import Explanation, TaskExplanation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model.add_arguments(parser)
    arguments.add_options(parser)
    arguments.add_json(parser)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write it there, as one page to look at"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options = arguments.options_of(args)
    with arguments.clean_stdout(args.json):
        found = explanation(args, options)
    if args.html is not None:
        args.html.parent.mkdir(parents=True, exist_ok=True)
        args.html.write_text(page.render(found, args.model), encoding="utf-8")
    print(json.dumps(found.to_json(), indent=2) if args.json else found)
    return 0


def explanation(args: argparse.Namespace, options: dict[str, Any]) -> Explanation:
    """Load ``MODEL`` and explain it."""
    loaded = model.load(args)
    from torch_pruner.dynamo import api

    use_threads(options)
    return api.explain(loaded.module, loaded.inputs, options=options)


def use_threads(options: dict[str, Any]) -> None:
    """Let torch's own kernels run on as many threads as ours, where the user says how many."""
    if (threads := options.get("threads")) is not None:
        import torch

        torch.set_num_threads(threads)


def tasks_of(found: Explanation) -> list[TaskExplanation]:
    """Every distinct kernel once, in the order of first use, with weights added."""
    tasks: dict[str, TaskExplanation] = {}
    for task in (t for graph in found.graphs for t in graph.tasks):
        known = tasks.get(task.workload)
        weight = task.weight if known is None else known.weight + task.weight
        tasks[task.workload] = replace(task, weight=weight)
    return list(tasks.values())


def task_table(tasks: Sequence[TaskExplanation]) -> list[str]:
    """Lines for people: kernel, shape, weight, FLOPs, and whether the cache has it; once anything
    was tuned, with what effort and by how many trials."""
    told = any(t.effort or t.trials for t in tasks)
    rows = [
        (
            *(t.name, t.shape, str(t.weight), flops_text(t.flops), "yes" if t.cached else "no"),
            *((t.effort or "-", str(t.trials)) if told else ()),
        )
        for t in tasks
    ]
    headers = ("kernel", "shape", "weight", "FLOPs", "cached", *(("effort", "trials") * told))
    return table(headers, rows, align="<<>>><>" if told else "<<>>>")
