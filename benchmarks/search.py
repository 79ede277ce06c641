"""How soon each search reaches what stock MetaSchedule reaches, task by task.

    python -m benchmarks.search --networks bert_tiny,resnet50,mobilenet_v2 --out docs/search.md

MetaSchedule (its space, its evolution, its gradient-boosted trees; our building and timing) gets
``--trials`` trials of a task. Ours get its time and as many trials, with each of ``--seeds``. In
the end everything that was the best at some moment is timed once more, all of a task in turns: the
curves are of those times, so that no moment of the machine decides. Each task runs in a process of
its own, each search with workers of its own that are up when the clock starts. Rows are written as
they come. Needs the extra ``search``.

``--searches draft-verify/moa,tune_tir`` adds MetaSchedule driven by its own code, with its builder
and its runner; ``undrafted/residual`` lets a cost model choose among points drawn at random.
``ansor``, ``felix`` and ``adatune`` are other papers' searches of our space, each with the cost
model of its paper or a named one (``ansor/mlp``, ``ansor/tlp``), and ``tlm`` proposes what a
generator writes, which comes from ``--weights`` (others know nothing then); docs/tuning.md says
what they are. With ``--reference-trials 1000 --trials 10`` MetaSchedule has more trials than the
others, which still get no more time: what some papers' tables ask.
``--workloads`` leaves all tasks out but those whose digests begin so, for baselines and ablations
over a few, with ``--reference-seeds 3``.
With ``--keep-references`` MetaSchedule's searches in ``--data`` are not run again, on the same
processor and with the same TVM (``references``): what they found is timed beside what ours find.
Cost models know nothing when they begin: the package's weights have seen these tasks. ``--weights``
gives them others, such as ``benchmarks.train --leave-out docs/data/search.json`` writes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import records, references, search_table, stock_search
from benchmarks.arguments import names, network_names, read_json
from benchmarks.collect import tasks_of
from benchmarks.job import answer_with, launch
from benchmarks.models import NETWORKS
from benchmarks.references import REFERENCE
from benchmarks.rows import refresh
from benchmarks.search_table import UNTOUCHED
from benchmarks.timing import code_identity, machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_pruner.task import Candidate, Task
    from torch_pruner.tuner.measure.base import MeasureExecutor
    from torch_pruner.tuner.search.base import SearchStrategy

UNDRAFTED = "undrafted"
NETWORKS_OF_THE_ISSUE = ["bert_tiny", "resnet50", "mobilenet_v2"]
FIRST, BATCH = 2, 8  # as in a tuning session
AGAIN_REPEATS = 9
# What a search of one task runs; how graphs become tasks shows in their workloads.
SEARCHED = (
    *(f"torch_pruner/{part}" for part in ("codegen", "families", "graph")),
    *(f"torch_pruner/{part}.py" for part in ("task", "target", "fingerprint")),
    *(f"torch_pruner/tuner/{part}" for part in ("measure", "search")),
    *(f"torch_pruner/tuner/cost_model/{part}.py" for part in ("base", "features")),
)
MODELS = {  # and of the cost models; any other needs all of them
    "": ("analytic",),
    "analytic": ("analytic",),
    "residual": ("analytic", "residual"),
    "moa": ("analytic", "residual"),  # as long as it has no weights
}


def model_of(name: str) -> str:
    """The cost model in the name of a search, or what its strategy has where none is named."""
    from torch_pruner.tuner import BASELINES

    strategy, _, model = name.partition("/")
    return model or BASELINES.get(strategy, "")


def parts_of(searches: Sequence[str], weights: str = "") -> tuple[str, ...]:
    """The parts of the package that these searches run."""
    models: set[str] = set()
    writes = any(name.startswith("tlm") for name in searches)
    generator = ("torch_pruner/tuner/generator", "torch_pruner/tuner/tensors.py") if writes else ()
    for name in searches:
        model = model_of(name)
        if model not in MODELS or weights:
            return (*SEARCHED, "torch_pruner/tuner/cost_model", *generator)
        models.update(MODELS[model])
    return (*SEARCHED, *(f"torch_pruner/tuner/cost_model/{m}.py" for m in sorted(models)))


@dataclass(frozen=True, slots=True)
class SearchJob:
    """One task and who searches it. ``file`` holds its graph; a search is "strategy/cost model".

    ``weights`` is the file that cost models begin with, if they take any. Where the reference's
    searches are ``kept`` from an earlier run, what they found is timed again all the same.
    """

    file: str
    workload: str
    threads: int
    searches: tuple[str, ...]
    seeds: tuple[int, ...]
    reference_seeds: tuple[int, ...]
    trials: int
    weights: str = ""
    reference_trials: int = 0  # 0: as many
    kept: str = ""  # a file of the reference's searches, which are not run again then

    def weights_of(self, search: str) -> str:
        """A generator's file is nothing for cost models: beside ``tlm`` others know nothing."""
        return "" if "tlm" in self.searches and search != "tlm" else self.weights

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """One row to produce."""

    name: str
    job: SearchJob
    time_limit_s: float

    @property
    def key(self) -> str:
        return f"{self.name}/{self.job.workload[:16]}/{self.job.threads} threads"

    @property
    def settings(self) -> dict[str, Any]:
        fields = json.loads(self.job.to_json())
        del fields["file"], fields["kept"]
        if not fields["reference_trials"]:
            del fields["reference_trials"]
        if file := fields.pop("weights"):
            fields["weights"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        return dict(fields)


def run(job: SearchJob) -> dict[str, Any]:
    """All searches of the task, the reference first, then the second timing of their best."""
    task = next(
        m.task for m in records.read([Path(job.file)])[0] if m.task.workload == job.workload
    )
    found = reference(task, job)
    limit_s = max(s["seconds"] for s in found)
    for name in job.searches:
        seeds = job.reference_seeds[:1] if name == UNTOUCHED else job.seeds  # it takes minutes
        found += [search(task, name, s, job.trials, limit_s, job.weights_of(name)) for s in seeds]
    again = timed_again(task, found)
    return {"status": "ok", "searches": [with_winner(s, again) for s in found], "again": again}


def reference(task: Task, job: SearchJob) -> list[dict[str, Any]]:
    """MetaSchedule's searches: those that are kept, or run now."""
    if job.kept:
        kept: list[dict[str, Any]] = json.loads(Path(job.kept).read_text())
        return kept
    trials = job.reference_trials or job.trials
    return [search(task, REFERENCE, seed, trials, math.inf) for seed in job.reference_seeds]


def search(
    task: Task, name: str, seed: int, trials: int, time_s: float, weights: str = ""
) -> dict[str, Any]:
    """One search of one task: when it found what, and on what it spent its time."""
    if name == UNTOUCHED:
        return stock_search.search(task, name, seed, trials)
    from torch_pruner.families import sketches_for
    from torch_pruner.task import MeasureStatus
    from torch_pruner.tuner.measure.local import LocalExecutor

    spent = dict.fromkeys(("draft", "verify", "build", "measure", "train"), 0.0)
    events: list[dict[str, Any]] = []
    best, count, failed = math.inf, 0, 0
    with LocalExecutor(task.threads, seed=seed) as executor:
        awake(executor, task)
        strategy = strategy_for(name, task, seed, weights)
        begin = time.perf_counter()
        with _Clock(spent, "draft"):
            strategy.start(task, sketches_for(task), rng=_generator(seed, task))
        while count < trials and time.perf_counter() - begin < time_s:
            with _Clock(spent, "draft"):
                strategy.draft()
            with _Clock(spent, "verify"):
                batch = strategy.propose(min(BATCH if count else FIRST, trials - count))
            if not batch:
                break
            results = _measured(executor, task, batch, spent)
            elapsed = time.perf_counter() - begin
            for result in results:
                count += 1
                failed += result.status is not MeasureStatus.OK
                if result.latency_s < best:
                    best = result.latency_s
                    events.append(stock_search.event(elapsed, count, best, result.candidate))
            with _Clock(spent, "train"):
                strategy.observe(results)
        seconds = time.perf_counter() - begin
    return {
        "search": name,
        "seed": seed,
        "trials": count,
        "failed": failed,
        "seconds": seconds,
        "phases": spent,
        "events": events,
    }


class _Clock:
    """Adds the time of a block to an entry."""

    def __init__(self, spent: dict[str, float], phase: str) -> None:
        self.spent, self.phase = spent, phase

    def __enter__(self) -> None:
        self.begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.spent[self.phase] += time.perf_counter() - self.begin


def _measured(
    executor: MeasureExecutor, task: Task, batch: list[Candidate], spent: dict[str, float]
) -> list[Any]:
    from torch_pruner.task import MeasureInput

    before = executor.phase_seconds.get("build", 0.0)
    begin = time.perf_counter()
    results = executor.measure([MeasureInput(task, c) for c in batch])
    building = executor.phase_seconds.get("build", 0.0) - before
    spent["build"] += building
    spent["measure"] += time.perf_counter() - begin - building
    return results


def strategy_for(name: str, task: Task, seed: int, weights: str = "") -> SearchStrategy:
    """A strategy with a cost model that knows nothing yet, or what is in the file ``weights``."""
    from torch_pruner.tuner import make_cost_model, make_strategy
    from torch_pruner.tuner.cost_model.weights import Weights

    strategy = name.partition("/")[0]
    if strategy == REFERENCE:  # as it comes, on all threads: no seed has to fix its proposals
        from torch_pruner.tuner.search.metaschedule import MetaScheduleSearch

        return MetaScheduleSearch(threads=task.threads)
    if strategy == "tlm":
        from torch_pruner.tuner.generator.model import Generator
        from torch_pruner.tuner.search.tlm import TLMSearch

        if not weights:
            raise ValueError("tlm needs --weights of benchmarks.tlm: it learns nothing by itself")
        return TLMSearch(Generator.from_bytes(Path(weights).read_bytes()))
    known = Weights.from_bytes(Path(weights).read_bytes()) if weights else None
    cost_model = make_cost_model(model_of(name) or "analytic", seed, known)
    if strategy == UNDRAFTED:
        from torch_pruner.tuner.search.draft_verify import DraftThenVerify

        return DraftThenVerify(make_cost_model("random", seed), cost_model)
    return make_strategy(strategy, cost_model, seed)


def _generator(seed: int, task: Task) -> Any:
    import numpy as np

    return np.random.default_rng(np.random.SeedSequence([seed, int(task.workload[:16], 16)]))


def awake(executor: MeasureExecutor, task: Task) -> None:
    """Start the workers, and import what any search needs, on a kernel that nobody searches."""
    from torch_pruner.compiler.drafting import draft
    from torch_pruner.graph.ir import GraphBuilder
    from torch_pruner.task import MeasureInput
    from torch_pruner.tuner.search import _tvm  # noqa: F401  MetaSchedule's import takes seconds

    b = GraphBuilder()
    spec = b.finish([b.pointwise("relu", b.input(0, (1024,), "float32"))])
    small = replace(task, name="warm-up", spec=spec)
    executor.measure([MeasureInput(small, draft(small))] * 2)


def timed_again(task: Task, found: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of every candidate that was the best of its search once, all in turns."""
    from torch_pruner.task import Candidate, MeasureInput
    from torch_pruner.tuner.measure.base import EvaluatorSpec
    from torch_pruner.tuner.measure.local import LocalExecutor

    events = [e for s in found for e in s["events"] if "candidate" in e]  # kept: the best alone
    candidates = {e["digest"]: e["candidate"] for e in events}
    evaluator = EvaluatorSpec(repeat=AGAIN_REPEATS, early_out=0.0)
    with LocalExecutor(task.threads, evaluator, n_workers=1) as executor:
        inputs = [MeasureInput(task, Candidate.from_json(c)) for c in candidates.values()]
        results = executor.measure(inputs)
    pairs = zip(candidates, results, strict=True)
    return {digest: r.latency_s for digest, r in pairs if math.isfinite(r.latency_s)}


def with_winner(search: dict[str, Any], again: dict[str, float]) -> dict[str, Any]:
    """A search whose events keep the best candidate alone: a trace of MetaSchedule's is long."""
    best = min(
        (e["digest"] for e in search["events"]), key=lambda d: again.get(d, math.inf), default=""
    )
    events = [
        e if e["digest"] == best else {k: v for k, v in e.items() if k != "candidate"}
        for e in search["events"]
    ]
    return {**search, "events": events}


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.render:
        _render(json.loads(Path(options.data).read_text()), options)
        return 0
    if importlib.util.find_spec("xgboost") is None:
        print("MetaSchedule's cost model is gradient-boosted trees: pip install the extra search")
        return 2
    with tempfile.TemporaryDirectory(prefix="search-") as folder:
        file = Path(folder) / "tasks.jsonl"
        plans = list(_plans(options, file))
        parts = parts_of(options.searches, options.weights)
        content = refresh(options.data, plans, produce, force=options.force, parts=parts)
    _render(content, options)
    return 0 if all(content["rows"][p.key]["status"] == "ok" for p in plans) else 1


def _parts_of_row(settings: dict[str, Any]) -> tuple[str, ...]:
    return parts_of(settings["searches"], settings.get("weights", ""))


def _render(content: dict[str, Any], options: argparse.Namespace) -> None:
    """The page and the picture of the rows that the present code made."""
    rows = {
        key: row
        for key, row in content["rows"].items()
        if row["code"] == code_identity(_parts_of_row(row["settings"]))
    }
    if len(rows) < len(content["rows"]):
        print(f"{len(content['rows']) - len(rows)} rows of other code are left out")
    content = {**content, "rows": rows}
    text = search_table.render(content, options.data, options.curve)
    if options.curve:
        search_table.draw(content, Path(options.curve))
    if options.out:
        Path(options.out).write_text(text)
    else:
        print("\n" + text)


def produce(plan: Plan) -> dict[str, Any]:
    """The row of one task."""
    row = launch(plan.job, time_limit_s=plan.time_limit_s, module="benchmarks.search")
    return {**row, "name": plan.name, "threads": plan.job.threads}


def _plans(options: argparse.Namespace, file: Path) -> Iterator[Plan]:
    from torch_pruner.fingerprint import DeviceFingerprint
    from torch_pruner.target import TargetSpec

    target, device = TargetSpec.resolve("auto", options.threads), DeviceFingerprint.detect()
    earlier = read_json(options.data) or {"rows": {}}
    for task in tasks_of(options, target):
        records.append(file, [records.task_line(task, device)])
        job = SearchJob(
            str(file), task.workload, task.threads, tuple(options.searches), tuple(options.seeds),
            tuple(range(options.reference_seeds)), options.trials, options.weights,
            options.reference_trials,
        )  # fmt: skip
        plan = Plan(task.name, job, options.time_limit)
        if options.keep_references:
            own = references.of_row(earlier, plan.key, plan.settings, machine())
            kept = references.write(own, file.with_name(f"{task.workload}.json"))
            plan = replace(plan, job=replace(job, kept=kept))
        yield plan


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument(
        "--networks", type=network_names, default=NETWORKS_OF_THE_ISSUE, metavar="NAME,..."
    )
    parser.add_argument("--tasks", type=int, default=8, help="at most so many of each network")
    parser.add_argument(
        "--workloads", type=names, default=[], metavar="DIGEST,...", help="no others; beginnings do"
    )
    parser.add_argument("--searches", type=names, default=["draft-verify/moa"], metavar="NAME,...")
    parser.add_argument("--trials", type=int, default=128)
    parser.add_argument(
        "--reference-trials", type=int, default=0, metavar="COUNT", help="0: as many as --trials"
    )
    parser.add_argument(
        "--seeds", type=lambda t: [int(n) for n in names(t)], default=[0, 1, 2], metavar="N,..."
    )
    parser.add_argument(
        "--weights", default="", metavar="FILE", help="for cost models that take any"
    )
    parser.add_argument("--reference-seeds", type=int, default=1, metavar="COUNT")
    parser.add_argument("--min-flops", type=float, default=1e5, help="leave smaller kernels out")
    parser.add_argument("--contractions", action="store_true", help="leave other kernels out")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--time-limit", type=float, default=1800.0, metavar="SECONDS", help="a row")
    parser.add_argument(
        "--keep-references", action="store_true", help="no MetaSchedule where --data has its search"
    )
    parser.add_argument("--force", action="store_true", help="make rows again that are up to date")
    parser.add_argument("--render", action="store_true", help="measure nothing: the rows so far")
    parser.add_argument("--data", default="docs/data/search.json")
    parser.add_argument("--out", help="write the Markdown page there, e.g. docs/search.md")
    parser.add_argument("--curve", help="write a PNG there, e.g. docs/search.png")
    options = parser.parse_args(arguments)
    options.batch, options.min_points = 1, 0
    options.layers_of = lambda name: 1 if NETWORKS[name].depth else None
    return options


def _child(text: str, answer: Path) -> None:
    fields = json.loads(text)
    for name in ("searches", "seeds", "reference_seeds"):
        fields[name] = tuple(fields[name])
    answer_with(lambda: run(SearchJob(**fields)), answer)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):  # started by ``launch``
        _child(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(main())
