"""What a second process pays when the cache is warm: start, imports, first call, nothing tuned.

The first process fills an empty cache. Each further one is fresh and must find everything: a miss
is an error. An eager process shows what the network and the imports cost without any compiler.
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


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    results = {}
    for name in options.networks:
        print(f"{name}: one cold and {options.rounds} warm processes ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="warm-") as folder:
            results[name] = measure(name, options, Path(folder))
    print("\n" + render(results))
    write_json(options.out, {"machine": timing.machine(), "networks": results})
    statuses = {run["status"] for of in results.values() for runs in of.values() for run in runs}
    return 0 if statuses == {"ok"} else 1


def measure(
    name: str, options: argparse.Namespace, folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """The results of the cold process, the warm ones and the eager ones."""
    job = Job(
        network=name,
        precision=options.precision,
        layers=options.layers,
        backend=options.backend,
        options=backend_options(options) if options.backend == "pruner" else {},
        threads=options.threads,
        check=False,
    )
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCH_PRUNER_CACHE_DIR": str(folder / "pruner"),
    }
    warm = replace(job, options={**job.options, "on_miss": "error"})
    cold_run = launch(job, environment=environment)
    eager = replace(job, backend="eager", options={})
    runs: dict[str, list[dict[str, Any]]] = {"cold": [cold_run], "warm": [], "eager": []}
    for _ in range(options.rounds):
        runs["warm"].append(launch(warm, environment=environment))
        runs["eager"].append(launch(eager, environment=environment))
    return runs


def render(results: dict[str, Any]) -> str:
    """Three lines per network, with medians over the rounds."""
    header = ["network", "", "whole process", "imports", "first call", "tuned", "measured"]
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
    parser.add_argument("--backend", default="pruner")
    add_tuning(parser, cache=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/warmstart.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
