"""How long the very first call takes, and what it buys: this backend beside inductor.

Every measurement is a fresh process with empty caches; backends alternate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import tables, timing
from benchmarks.arguments import add_tuning, backend_options, network_names, write_json
from benchmarks.job import Job, launch


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    backends = list(dict.fromkeys((options.backend, options.against)))
    results: dict[str, Any] = {}
    for name in options.networks:
        jobs = {backend: _job(name, backend, options) for backend in backends}
        runs: dict[str, list[dict[str, Any]]] = {backend: [] for backend in backends}
        for number in range(1, options.rounds + 1):
            for backend, job in jobs.items():
                print(f"{name}, round {number}, {backend} ...", end=" ", flush=True)
                runs[backend].append(run := cold(job, options.time_limit))
                print(f"{run['status']} {run['error']}".rstrip(), flush=True)
        results[name] = {backend: _summary(backend, of) for backend, of in runs.items()}
    print("\n" + render(results))
    write_json(options.out, {"machine": timing.machine(), "networks": results})
    failed = any(s["status"] != "ok" for of in results.values() for s in of.values())
    return 1 if failed else 0


def cold(job: Job, time_limit_s: float) -> dict[str, Any]:
    """Runs a job with cache directories that nobody has used."""
    with tempfile.TemporaryDirectory(prefix="cold-") as folder:
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            "TORCH_PRUNER_CACHE_DIR": str(Path(folder) / "pruner"),
        }
        return launch(job, time_limit_s=time_limit_s, environment=environment)


def render(results: dict[str, Any]) -> str:
    """One line per network and backend."""
    header = ["network", "backend", "first call", "whole process", "measured", "then, per call"]
    lines = []
    for name, of in results.items():
        for backend, s in of.items():
            if s["status"] != "ok":
                lines.append([name, backend, s["status"], "", "", ""])
                continue
            lines.append(
                [
                    name,
                    backend,
                    timing.duration(s["first_call_s"]),
                    timing.duration(s["process_s"]),
                    str(s["candidates_measured"]),
                    timing.duration(s["steady_s"]),
                ]
            )
    return tables.plain(header, lines)


def _summary(backend: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, with the rounds themselves."""
    good = [run for run in runs if run["status"] == "ok"]
    if len(good) < len(runs):
        bad = next(run for run in runs if run["status"] != "ok")
        return {"status": bad["status"], "error": bad["error"], "runs": runs}
    reports = [run["report"] for run in good if run["report"]]
    return {
        "status": "ok",
        "first_call_s": statistics.median(run["first_call_s"] for run in good),
        "process_s": statistics.median(run["process_s"] for run in good),
        "steady_s": statistics.median(run["latency"][backend]["median_s"] for run in good),
        "candidates_measured": max((r["candidates_measured"] for r in reports), default=0),
        "runs": runs,
    }


def _job(name: str, backend: str, options: argparse.Namespace) -> Job:
    ours = backend_options(options) if backend == "pruner" else {}
    return Job(
        network=name,
        precision=options.precision,
        layers=options.layers,
        backend=backend,
        options=ours,
        threads=options.threads,
        steady=True,
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coldstart", description=__doc__)
    parser.add_argument("--networks", type=network_names, default=["bert_tiny"], metavar="NAME,...")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--backend", default="pruner")
    parser.add_argument("--against", default="inductor")
    add_tuning(parser, cache=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=1800.0, metavar="SECONDS")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/coldstart.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
