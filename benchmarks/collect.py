"""Measures random and drafted schedules of the networks' kernels: data to train cost models on.

Results are appended to a file of JSON lines as they come. A run that was interrupted goes on where
it stopped: a task that is whole is not measured again. In the end the best ``--finalists`` of a
task are timed anew and more often, and that result replaces the first: the least of hundreds of
noisy times is a lucky one. Timings mean something on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import records
from benchmarks.arguments import names, network_names
from benchmarks.models import NETWORKS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_pruner.task import Candidate, MeasureResult, Task
    from torch_pruner.tuner.measure.base import MeasureExecutor

BATCH = 14  # two groups that are timed side by side
REPEATS = 7  # of each, more than a search needs: models are judged by these times
FINAL_REPEATS = 15
GENERATED = 4096  # random points that the drafted ones are the best of
DRAWN = 32  # at least so many times the random ones: most points break a rule, or come twice


def main(arguments: list[str] | None = None) -> int:
    from torch_pruner.target import TargetSpec
    from torch_pruner.tuner.measure.local import LocalExecutor

    options = _parse(arguments)
    path = Path(options.out)
    target = TargetSpec.resolve(options.target, options.threads)
    tasks = list(tasks_of(options, target))
    print(f"{len(tasks)} tasks", flush=True)
    with LocalExecutor(options.threads, seed=options.seed) as executor:
        for number, task in enumerate(tasks):
            count = collect(task, options, executor, path)
            print(f"{number + 1}/{len(tasks)} {task.name}: {count} measured", flush=True)
    return 0


def collect(task: Task, options: argparse.Namespace, executor: MeasureExecutor, path: Path) -> int:
    """Measures one task unless it is whole; returns how many candidates that were."""
    known, _ = records.read([path])
    wanted = records.Measured(task, executor.device.digest())
    mine = next((m for m in known if m.key == wanted.key), None)
    if mine is None:
        records.append(path, [records.task_line(task, executor.device)])
    from torch_pruner.task import MeasureInput

    def measured(some: Sequence[Candidate], repeats: int) -> list[MeasureResult]:
        executor.evaluator = replace(executor.evaluator, repeat=repeats)
        found = executor.measure([MeasureInput(task, c) for c in some])
        records.append(path, [records.result_line(task, executor.device, r) for r in found])
        return found

    asked, known_results = candidates(task, options), mine.results if mine else []
    whole = {r.candidate for r in known_results}.issuperset(asked)
    if whole and not finalists(known_results, options.finalists, options.repeats):
        return 0
    results: list[MeasureResult] = []  # all anew: times of two runs are not on one scale
    for at in range(0, len(asked), BATCH):
        results += measured(asked[at : at + BATCH], options.repeats)
    if last := finalists(results, options.finalists, options.repeats):
        measured(last, FINAL_REPEATS)
    return len(asked)


def finalists(
    results: Sequence[MeasureResult], count: int, repeats: int = REPEATS
) -> list[Candidate]:
    """The ``count`` best, or nobody where as many were timed more than ``repeats`` times before."""
    from torch_pruner.task import MeasureStatus

    often = sum(len(r.run_secs) > repeats for r in results)
    good = sorted((r for r in results if r.status is MeasureStatus.OK), key=lambda r: r.latency_s)
    return [r.candidate for r in good[:count]] if often < min(count, len(good)) else []


def candidates(task: Task, options: argparse.Namespace) -> list[Candidate]:
    """``--random`` valid points and the ``--drafted`` best of many by the draft model, shuffled.

    The same for the same seed, task and space, in any process.
    """
    from torch_pruner.families import sketches_for
    from torch_pruner.tuner.search.space import SketchSpace

    rng = np.random.default_rng([options.seed, int(task.workload[:16], 16)])
    found: dict[Candidate, None] = {}
    drafts: list[tuple[float, Candidate]] = []
    spaces = [SketchSpace(sketch) for sketch in sketches_for(task)]
    for space in spaces:
        rows = space.random(max(GENERATED, DRAWN * options.random), rng)
        share = rows[rng.permutation(len(rows))][: options.random // len(spaces)]
        found |= dict.fromkeys(space.candidates(share))
        rows = space.unique(np.concatenate([rows, space.default()]))
        seconds = space.sketch.symbols(space.decisions(rows)).latency_s
        best = np.argsort(seconds, kind="stable")[: options.random + options.drafted]
        drafts += zip(seconds[best], space.candidates(rows[best]), strict=True)
    chosen = [c for _, c in sorted(drafts, key=lambda d: d[0]) if c not in found]
    found |= dict.fromkeys(chosen[: options.drafted])
    everything = list(found)
    return [everything[i] for i in rng.permutation(len(everything))]


def tasks_of(options: argparse.Namespace, target: object) -> Iterator[Task]:
    """The distinct kernels of the networks, those of least size left out."""
    import torch

    from benchmarks.models import call, load
    from torch_pruner.graph.describe import flops_of
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.ops import OpKind
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Task

    assert isinstance(target, TargetSpec)
    seen: set[str] = set()
    for name in options.networks:
        with tempfile.TemporaryDirectory(prefix="collect-") as folder:
            settings = {"effort": "none", "debug_dir": folder, "cache_dir": f"{folder}/cache"}
            module, inputs = load(name, torch.float32, options.batch, options.layers_of(name))
            torch._dynamo.reset()
            with torch.no_grad():
                compiled = torch.compile(
                    module, backend="pruner", options={**settings, "threads": options.threads}
                )
                call(compiled, inputs)
            files = sorted(Path(folder).glob("*/kernels.json"))
            kernels = [k for file in files for k in json.loads(file.read_text())]
        count = 0
        for kernel in kernels:
            task = Task(kernel["name"], Graph.from_json(kernel["spec"]), target, options.threads)
            contracts = any(n.kind is OpKind.CONTRACT for n in task.spec.nodes)
            small = flops_of(task.spec) < options.min_flops
            if task.workload in seen or small or (options.contractions and not contracts):
                continue
            if not task.workload.startswith(tuple(options.workloads) or ""):
                continue
            if options.min_points and len(candidates(task, options)) < options.min_points:
                continue
            seen.add(task.workload)
            count += 1
            if count <= options.tasks:
                yield replace(task, weight=1)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.collect", description=__doc__)
    parser.add_argument("--networks", type=network_names, default=["resnet18"], metavar="NAME,...")
    parser.add_argument("--out", required=True, help="a file of JSON lines, continued if it exists")
    parser.add_argument("--random", type=int, default=64, help="random candidates of each task")
    parser.add_argument("--drafted", type=int, default=64, help="the draft model's best of each")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timings of each")
    parser.add_argument("--finalists", type=int, default=12, help="of the best, timed anew")
    parser.add_argument("--tasks", type=int, default=1000, help="at most so many of each network")
    parser.add_argument("--min-flops", type=float, default=1e5, help="leave smaller kernels out")
    parser.add_argument("--contractions", action="store_true", help="leave other kernels out")
    parser.add_argument(
        "--min-points", type=int, default=0, help="leave tasks of fewer candidates out"
    )
    parser.add_argument(
        "--workloads", type=names, default=[], metavar="DIGEST,...", help="no others; beginnings do"
    )
    parser.add_argument("--layers", type=int, help="build language models with so many layers")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--target", default="auto", help="JSON of a TVM target, e.g. another mcpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    depth = options.layers
    options.layers_of = lambda name: depth if NETWORKS[name].depth else None
    return options


if __name__ == "__main__":
    sys.exit(main())
