"""How close each contraction kernel of a network comes to the machine's peak.

    python -m benchmarks.tasks --networks bert_base,llama,gpt2,resnet50 --effort full

The kernels that tuning chose are built again and timed in turns with the register-only loop, each
call on the next of several sets of operands, as a network's layers do. Each network runs in a
process of its own, with an empty cache unless ``--cache-dir`` is given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import tables, timing
from benchmarks.arguments import add_tuning, backend_options, network_names, write_json
from benchmarks.job import ProcessJob, answer_with, compiled, launch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner import Report
    from torch_pruner.graph.ir import Graph

DEFAULT = ["bert_base", "llama", "gpt2", "resnet50"]
SETS_BYTES = 256 << 20
"""Operands of one kernel take this much at most."""

LOW = 0.6
"""A task below this share of the peak is named with its limit."""


@dataclass(frozen=True, slots=True)
class TaskJob(ProcessJob):
    """Which network to compile, and how."""

    network: str
    precision: str = "float32"
    batch: int = 1
    layers: int | None = None


def run(job: TaskJob) -> dict[str, Any]:
    """Tasks with their FLOPs, bytes and seconds; rates of the machine before and after."""
    import torch

    import torch_pruner
    from benchmarks import machine_peak, models

    threads = job.use_threads()
    dtype = models.PRECISIONS[job.precision]
    module, inputs = models.load(job.network, dtype, job.batch, job.layers)
    with torch.no_grad():
        models.call(compiled(module, "pruner", job.options), inputs)
    report = torch_pruner.last_report()
    assert report is not None
    machine = machine_peak.measure(threads)
    tasks = contractions(report, job.options, threads)
    return {
        "status": "ok",
        "threads": threads,
        "flops_per_s": max(machine["flops_per_s"][str(threads)], *(t["peak"] for t in tasks)),
        "bytes_per_s": machine["bytes_per_s"][str(threads)],
        "machine": machine,
        "tasks": tasks,
    }


def contractions(report: Report, options: dict[str, Any], threads: int) -> list[dict[str, Any]]:
    """The tasks of a report that hold a contraction, timed, with the bytes that each must move.

    A task that runs untuned or in a vendor library has no kernel to time, and no seconds.
    """
    from torch_pruner.cache import KernelEntry
    from torch_pruner.compiler.stores import store_for
    from torch_pruner.config import Config
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.ops import ITEMSIZE, OpKind

    store = store_for(Config.from_options(options=options))
    entries = {
        item.entry.key.workload: item.entry
        for item in store.ls()
        if isinstance(item.entry, KernelEntry) and item.entry.key.threads == threads
    }
    found = []
    for task in report.tasks:
        row = {
            "name": task.name,
            "calls": task.weight,
            "flops": task.flops,
            "bytes": None,
            "seconds": None,
            "peak": 0.0,
            "reported_seconds": task.latency_after_s,
            "source": task.source,
            "sketch": task.sketch,
        }
        entry = entries.get(task.workload)
        if entry is not None:
            graph = Graph.from_json(json.loads(entry.workload_text))
            if not any(node.kind is OpKind.CONTRACT for node in graph.nodes):
                continue
            ends = {*graph.inputs, *graph.outputs}
            row["bytes"] = sum(graph.nodes[i].numel * ITEMSIZE[graph.nodes[i].dtype] for i in ends)
            if entry.source != "library":
                row |= clocked(graph, entry.candidate, task.weight, threads)
        found.append(row)
    return found


def clocked(
    graph: Graph, candidate: Mapping[str, Any], calls: int, threads: int
) -> dict[str, float]:
    """Median seconds of a kernel, in turns with the loop that gives the peak.

    Each of ``calls`` layers has operands of its own, as far as they fit.
    """
    from benchmarks import machine_peak
    from torch_pruner import families
    from torch_pruner.codegen.build.lower import aligned, compile_kernel
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Candidate

    target = TargetSpec.detect(threads)
    chosen = Candidate.from_json(candidate)
    kernel = families.named(chosen.sketch).schedule(graph, chosen, target)
    built = compile_kernel(kernel, target)
    specs = [*kernel.inputs, *kernel.outputs]
    size = max(1, sum(spec.nbytes for spec in specs))

    random = np.random.default_rng(0)

    def operands() -> list[Any]:
        arrays = [aligned(spec.shape, spec.dtype) for spec in specs]
        for array in arrays:  # zero is an index that fits everywhere
            floating = array.dtype.kind not in "biu"
            array[...] = random.random(array.shape, np.float32) if floating else 0
        return arrays

    sets = [built.bind(operands()) for _ in range(max(1, min(calls, SETS_BYTES // size)))]
    turn = itertools.cycle(sets)
    peak, flops = machine_peak.fma_loop(threads)
    timings = timing.interleave({"kernel": lambda: next(turn)(), "peak": peak}, min_seconds=0.1)
    seconds = timings["kernel"].median_s
    return {"seconds": seconds, "peak": flops / timings["peak"].median_s}


def share(task: dict[str, Any], flops_per_s: float) -> float:
    """Of the FMA peak."""
    return task["flops"] / task["seconds"] / flops_per_s


def limit(task: dict[str, Any], flops_per_s: float, bytes_per_s: float) -> str:
    """Which of the two the machine runs out of first, were the operands in memory."""
    return "memory" if task["bytes"] / bytes_per_s > task["flops"] / flops_per_s else "arithmetic"


def timed_tasks(tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with a measured latency, the longest in all calls first."""
    known = [t for t in tasks if t["seconds"] and t["bytes"] is not None]
    return sorted(known, key=lambda t: -t["calls"] * t["seconds"])


def weighted_share(tasks: Sequence[dict[str, Any]], flops_per_s: float) -> float | None:
    """Mean share of the peak, weighted by FLOPs of all calls; None without a measured task."""
    known = timed_tasks(tasks)
    flops = sum(t["calls"] * t["flops"] for t in known)
    if not flops:
        return None
    return sum(t["calls"] * t["flops"] * share(t, flops_per_s) for t in known) / flops


def in_turns(tasks: Sequence[dict[str, Any]]) -> float | None:
    """Like ``weighted_share``, of what the loop reached in turns with each kernel.

    A shared machine has minutes in which it does half of the work; only this share knows of them.
    """
    known = timed_tasks(tasks)
    flops = sum(t["calls"] * t["flops"] for t in known)
    if not flops:
        return None
    return sum(t["calls"] * t["flops"] * share(t, t["peak"]) for t in known) / flops


def render(name: str, result: dict[str, Any]) -> str:
    """One network: a line for each task, then the mean and what falls short."""
    peak, read = result["flops_per_s"], result["bytes_per_s"]
    known = timed_tasks(result["tasks"])
    lines = [
        [
            t["name"][:44],
            str(t["calls"]),
            timing.duration(t["seconds"]),
            f"{t['flops'] / t['seconds'] / 1e9:.0f}",
            f"{100 * share(t, peak):.0f} %",
            f"{t['bytes'] / 1e6:.1f}",
            limit(t, peak, read),
            f"{t['source']} {t['sketch']}".strip(),
        ]
        for t in known
    ]
    header = ["task", "calls", "latency", "GFLOP/s", "of peak", "MB", "limit", "from"]
    mean = weighted_share(result["tasks"], peak)
    beside = in_turns(result["tasks"])
    shown, turns = (f"{100 * m:.1f} %" if m else "unknown" for m in (mean, beside))
    text = [
        f"{name}: FMA peak {peak / 1e9:.0f} GFLOP/s, streaming read {read / 1e9:.1f} GB/s",
        tables.plain(header, lines),
        f"mean share of the peak, weighted by FLOPs: {shown}",
        f"of what the loop reached in turns with each kernel: {turns}",
    ]
    low = [t for t in known if share(t, peak) < LOW and limit(t, peak, read) == "arithmetic"]
    text += [f"below {100 * LOW:.0f} %: {t['name']}" for t in low]
    if missing := len(result["tasks"]) - len(known):
        text.append(f"{missing} tasks run untuned or in a library and are not in the table")
    return "\n".join(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks", description=__doc__)
    parser.add_argument("--networks", type=network_names, default=DEFAULT, metavar="NAME,...")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int)
    add_tuning(parser)
    parser.add_argument("--time-limit", type=float, default=3600.0, metavar="SECONDS")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/tasks.json")
    options = parser.parse_args(arguments)
    results = {}
    for name in options.networks:
        with tempfile.TemporaryDirectory(prefix="tasks-") as folder:
            settings = {"cache_dir": folder} | backend_options(options)
            job = TaskJob(
                name,
                options.precision,
                options.batch,
                options.layers,
                options=settings,
                threads=options.threads,
            )
            result = launch(job, time_limit_s=options.time_limit, module="benchmarks.tasks")
        results[name] = result
        text = f"{name}: {result['status']}: {result.get('error', '')}"
        print((render(name, result) if result["status"] == "ok" else text) + "\n", flush=True)
    write_json(options.out, {"machine": timing.machine(), "networks": results})
    return 0 if all(r["status"] == "ok" for r in results.values()) else 1


def _child(text: str, answer: Path) -> None:
    job = TaskJob.from_json(text)
    answer_with(lambda: run(job), answer)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):  # started by ``launch``
        _child(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(main())
