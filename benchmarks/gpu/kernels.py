"""Every kernel of whole networks on the GPU at hand: our drafts beside the vendor's and the bound.

    python -m benchmarks.gpu.kernels --networks bert_base --write-tasks tasks.json   # needs no GPU
    python -m benchmarks.gpu.kernels --tasks tasks.json --count 8 --out kernels.json

The first captures the networks and cuts them into kernels. The second builds the draft model's best
schedules of each kernel and times them as tuning does (checked against the reference, launches
queued ahead, weights from memory), and ATen's kernels for it where there are any. ``--records``
writes what was measured for ``benchmarks.train``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import records, tables, timing
from benchmarks.arguments import network_names, write_json
from torch_pruner.cards import CARDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.cards import Card
    from torch_pruner.task import Candidate, MeasureResult, Task

POINTS = 4096  # random points of a space of which drafts are the best


def captured(names: Sequence[str], precision: str, card: Card, layers: int | None) -> list[Task]:
    """The distinct kernels of networks on a card, with how often each is called. Runs nothing."""
    from dataclasses import replace

    from benchmarks.gpu.tasks import tasks_of

    found: dict[str, Task] = {}
    for name in names:
        for task in tasks_of(name, precision, card, layers):
            before = found.get(task.workload)
            weight = task.weight + (before.weight if before else 0)
            found[task.workload] = replace(task, weight=weight)
    return list(found.values())


def drafted(task: Task, count: int) -> list[tuple[float, Candidate]]:
    """The draft model's best of each sketch with the seconds that it expects."""
    import numpy as np

    from torch_pruner.families import sketches_for
    from torch_pruner.task import Candidate

    rng, found = np.random.default_rng(0), []
    for sketch in sketches_for(task):
        points = np.stack([rng.choice(d, POINTS) for d in sketch.domains], axis=1)
        points = points[sketch.valid(points)]
        if len(points) == 0:
            continue
        points = np.unique(np.concatenate([points, [sketch.default()]]), axis=0)
        seconds = sketch.symbols(points).latency_s
        order = np.argsort(seconds, kind="stable")[:count]
        found += [
            (float(seconds[k]), Candidate(sketch.name, tuple(sorted(sketch.named(p).items()))))
            for k, p in zip(order, points[order], strict=True)
        ]
    return sorted(found, key=lambda pair: pair[0])


def bound_s(task: Task, card: Card) -> float:
    """The larger of operations over the peak and bytes over the bandwidth."""
    from torch_pruner.graph.contraction import traffic_bytes
    from torch_pruner.graph.describe import flops_of

    dtype = task.spec.nodes[task.spec.inputs[0]].dtype
    return max(
        flops_of(task.spec) / card.peak_flops(dtype),
        traffic_bytes(task.spec) / card.dram_bytes_per_s,
    )


def measure(tasks: Sequence[Task], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each task. Raises ``RuntimeError`` where no card that is known is at hand."""
    import torch

    from torch_pruner.config import Config
    from torch_pruner.devices import device_for
    from torch_pruner.task import MeasureInput, MeasureStatus

    config = Config.from_options(options={"target": {"kind": "cuda"}})
    device = device_for(torch.device("cuda", 0), config)
    vendor = device.vendor()
    executor = device.executor(config, 1)
    chosen = [drafted(task, options.count) for task in tasks]
    inputs = [MeasureInput(t, c) for t, some in zip(tasks, chosen, strict=True) for _, c in some]
    results = iter(executor.measure(inputs))
    rows = []
    for task, some in zip(tasks, chosen, strict=True):
        found: list[MeasureResult] = [next(results) for _ in some]
        if options.records:
            lines = [records.result_line(task, executor.device, r) for r in found]
            head = records.task_line(task, executor.device)
            records.append(Path(options.records), [head, *lines])
        drafts = [
            {
                "sketch": c.sketch, "decisions": dict(c.decisions), "expected_s": s,
                "status": r.status.value, "error": (r.error or "")[:400],
                "seconds": r.latency_s if r.status is MeasureStatus.OK else None,
            }
            for (s, c), r in zip(some, found, strict=True)
        ]  # fmt: skip
        rows.append(
            {
                "name": task.name, "weight": task.weight, "workload": task.workload,
                "bound_s": bound_s(task, task.target.card or CARDS[options.card]),
                "vendor_s": vendor.latency_s(task.spec) if vendor else None, "drafts": drafts,
            }
        )  # fmt: skip
    return rows


def render(rows: Sequence[dict[str, Any]]) -> str:
    header = ["kernel", "calls", "bound", "draft", "best of", "right", "vendor"]
    lines = []
    for r in rows:
        times = [d["seconds"] for d in r["drafts"] if d["seconds"]]
        first = r["drafts"][0]["seconds"] if r["drafts"] else None
        shown = [r["bound_s"], first, min(times, default=None), r["vendor_s"]]
        bound, draft, best, vendor = (timing.duration(s) if s else "" for s in shown)
        right = f"{len(times)} of {len(r['drafts'])}"
        lines.append([r["name"][:60], str(r["weight"]), bound, draft, best, right, vendor])
    return tables.markdown(header, lines)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    card = CARDS[options.card]
    if options.write_tasks:
        tasks = captured(options.networks, options.precision, card, options.layers)
        content = [{"name": t.name, "weight": t.weight, "spec": t.spec.to_json()} for t in tasks]
        write_json(options.write_tasks, content)
        return 0
    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Task

    target = TargetSpec.cuda(card)
    tasks = [
        Task(t["name"], Graph.from_json(t["spec"]), target, 1, weight=t["weight"])
        for file in options.tasks
        for t in json.loads(Path(file).read_text())
    ]
    rows = measure(tasks, options)
    print(render(rows))
    write_json(options.out, {"machine": timing.machine(), "card": card.name, "rows": rows})
    wrong = [d for r in rows for d in r["drafts"] if d["seconds"] is None]
    for draft in wrong[:10]:
        print(draft, file=sys.stderr)
    return int(bool(wrong))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels", description=__doc__)
    parser.add_argument("--networks", type=network_names, default=["bert_base"], metavar="NAME,...")
    parser.add_argument("--precision", default="float16")
    parser.add_argument("--layers", type=int, help="build language models with so many layers")
    parser.add_argument("--card", default="h100", choices=sorted(CARDS))
    parser.add_argument("--write-tasks", metavar="FILE", help="only capture, to this JSON file")
    parser.add_argument("--tasks", type=lambda t: t.split(","), default=[], metavar="FILE,...")
    parser.add_argument("--count", type=int, default=8, help="drafts of each kernel and sketch")
    parser.add_argument("--records", help="append what was measured to this file of JSON lines")
    parser.add_argument("--out", help="write JSON there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
