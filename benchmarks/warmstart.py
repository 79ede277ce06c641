"""What a second process pays when caches are warm: start, imports, first call, nothing tuned.

For each way of starting a first process fills empty caches. Then rounds of fresh processes, one of
each in turns: our kernel store alone, the store with torch's own cache, inductor with its caches,
both as torch saves them ahead of time (``benchmarks.saved``), and eager, which shows what the
network and the imports cost without any compiler. Ours must find everything: a miss is an error.
"First call" is from ``torch.compile`` (saved: from its loading) to the first result, all modules
imported before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import tables, timing
from benchmarks.arguments import add_tuning, backend_options, network_names, write_json
from benchmarks.job import Job, launch
from benchmarks.saved import SavedJob

# What a first call would import, torch's own as well: imports are a column of their own.
_BOTH = (
    "torch._dynamo", "torch._functorch.partitioners", "torch._inductor.compiler_bisector",
    "torch._inductor.codegen.cuda_combined_scheduling", "torch._inductor.debug",
    "torch.distributed.tensor.experimental",
)  # fmt: skip
OURS = (*_BOTH, "torch_pruner.dynamo.backend", "tvm_ffi")
THEIRS = (*_BOTH, "torch._inductor.compile_fx")
# Backend, modules to import before, and whether AOTAutograd's cache is on.
WAYS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "store alone": ("pruner", OURS, {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}),
    "with torch's cache": ("pruner", OURS, {"TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}),
    "inductor": ("inductor", THEIRS, {"TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}),
    "eager": ("eager", (), {}),
}
# Of these torch keeps the traced graph with its code in a file, which the process loads.
SAVED = {"saved": "with torch's cache", "inductor, saved": "inductor"}


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    results = {}
    for name in options.networks:
        ways = len(WAYS) + len(SAVED)
        print(f"{name}: {ways} cold and {options.rounds} times as many warm processes ...")
        with tempfile.TemporaryDirectory(prefix="warm-") as folder:
            results[name] = measure(name, options, Path(folder))
    print("\n" + render(results))
    write_json(options.out, {"machine": timing.machine(), "networks": results})
    statuses = {run["status"] for of in results.values() for runs in of.values() for run in runs}
    return 0 if statuses == {"ok"} else 1


def measure(
    name: str, options: argparse.Namespace, folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """The results of the warm processes of each way, after one cold process of each."""
    jobs: dict[str, Job | SavedJob] = {way: _job(name, way, options) for way in WAYS}
    jobs |= {way: _saved(name, way, options, folder) for way in SAVED}
    surroundings = {way: _environment(way, folder) for way in jobs}
    for way, job in jobs.items():
        print(f"  cold: {way}", flush=True)
        cold = _launch(job, surroundings[way])
        if cold["status"] != "ok":
            return {way: [cold]}
    warm: dict[str, list[dict[str, Any]]] = {way: [] for way in jobs}
    for _ in range(options.rounds):
        for way, job in jobs.items():
            warm[way].append(_launch(_warm(job), surroundings[way]))
    return warm


def _launch(job: Job | SavedJob, environment: dict[str, str]) -> dict[str, Any]:
    module = "benchmarks.job" if isinstance(job, Job) else "benchmarks.saved"
    return launch(job, environment=environment, module=module)


def _warm(job: Job | SavedJob) -> Job | SavedJob:
    """The job of a process that must find everything."""
    if isinstance(job, SavedJob):
        return replace(job, load=True)
    if job.backend == "pruner":
        return replace(job, options={**job.options, "on_miss": "error"})
    return job


def _saved(name: str, way: str, options: argparse.Namespace, folder: Path) -> SavedJob:
    fields = _fields(name, SAVED[way], options)
    return SavedJob(**fields, file=str(folder / f"{fields['backend']}.compiled"))


def _job(name: str, way: str, options: argparse.Namespace) -> Job:
    return Job(**_fields(name, way, options), check=False)


def _fields(name: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    backend, preload, _ = WAYS[way]
    return {
        "network": name,
        "precision": options.precision,
        "layers": options.layers,
        "backend": backend,
        "options": backend_options(options) if backend == "pruner" else {},
        "threads": options.threads,
        "preload": preload,
    }


def _environment(way: str, folder: Path) -> dict[str, str]:
    """torch's caches are each way's own, our kernels are the same for all."""
    return {
        **WAYS[SAVED.get(way, way)][2],
        "TORCHINDUCTOR_CACHE_DIR": str(folder / way.replace(" ", "-")),
        "TORCH_PRUNER_CACHE_DIR": str(folder / "pruner"),
    }


def render(results: dict[str, Any]) -> str:
    """A line per network and way, with medians over the rounds."""
    header = ["network", "way", "whole process", "imports", "first call", "tuned", "measured"]
    lines = []
    for name, of in results.items():
        lines += [[name, kind, *_cells(runs)] for kind, runs in of.items()]
    return tables.plain(header, lines)


def _cells(runs: list[dict[str, Any]]) -> list[str]:
    if bad := [run for run in runs if run["status"] != "ok"]:
        return [bad[0]["status"], bad[0]["error"][:40], "", "", ""]
    seconds = [
        timing.duration(statistics.median(run[field] for run in runs))
        for field in ("process_s", "import_s", "first_call_s")
    ]
    reports = [run["report"] for run in runs if run["report"]]
    tuned = max((r["tasks"].get("tuned", 0) for r in reports), default=0)
    measured = max((r["candidates_measured"] for r in reports), default=0)
    return [*seconds, str(tuned), str(measured)]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warmstart", description=__doc__)
    parser.add_argument("--networks", type=network_names, default=["bert_tiny"], metavar="NAME,...")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int)
    add_tuning(parser, cache=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/warmstart.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
