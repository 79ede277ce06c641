"""How long the very first call takes, and what it buys: this backend beside inductor.

Every measurement is a fresh process with empty caches; backends alternate. Untuned unless
``--effort`` says otherwise, and blocking. All modules that a first call needs are imported before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from benchmarks import tables, timing
from benchmarks.arguments import (
    add_tuning,
    backend_options,
    network_names,
    read_json,
    write_json,
)
from benchmarks.job import Job, launch_cold
from benchmarks.warmstart import OURS, THEIRS

SEVEN = (
    "bert_tiny", "resnet50", "efficientnet_b7", "swin_t", "convnext_t", "unet", "llama",
)  # fmt: skip


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
                runs[backend].append(run := launch_cold(job, time_limit_s=options.time_limit))
                print(f"{run['status']} {run['error']}".rstrip(), flush=True)
        results[name] = {backend: _summary(backend, of) for backend, of in runs.items()}
        _write(options.out, name, results[name])
    print("\n" + render(results))
    failed = any(s["status"] != "ok" for of in results.values() for s in of.values())
    return 1 if failed else 0


def _write(path: str | None, name: str, result: dict[str, Any]) -> None:
    """Put one network into the file, beside what other runs left there."""
    known = read_json(path) or {}
    machine = timing.machine()
    networks = known.get("networks", {}) | {name: result}
    # What an older file says of its networks is true of those that say nothing themselves.
    machines = dict.fromkeys(known.get("networks", {}), known.get("machine"))
    machines |= known.get("machines", {}) | {name: machine}
    write_json(path, {"machine": machine, "machines": machines, "networks": networks})


def render(results: dict[str, Any]) -> str:
    """One line per network and backend, and one for what our first call was spent on."""
    header = [
        "network",
        "backend",
        "first call",
        "over inductor's",
        "whole process",
        "then, per call",
    ]
    lines, splits = [], []
    for name, of in results.items():
        theirs = of.get("inductor", {}).get("first_call_s")
        for backend, s in of.items():
            if s["status"] != "ok":
                lines.append([name, backend, s["status"], "", "", ""])
                continue
            ratio = f"{s['first_call_s'] / theirs:.2f}" if theirs else ""
            seconds = (timing.duration(s[k]) for k in ("first_call_s", "process_s", "steady_s"))
            first, process, steady = seconds
            lines.append([name, backend, first, ratio, process, steady])
            if s["split_s"]:
                split = ", ".join(f"{what} {took:.2f}" for what, took in s["split_s"].items())
                splits.append(f"* {name}: {s['kernels']} kernels; seconds: {split}")
    return "\n".join([tables.markdown(header, lines), "", *splits])


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
        "kernels": max((sum(r["tasks"].values()) for r in reports), default=0),
        "split_s": _split([run for run in good if run["report"]]),
        "runs": runs,
    }


def _split(runs: list[dict[str, Any]]) -> dict[str, float]:
    """What first calls of ours were spent on, in medians: Dynamo's share, each phase, the rest.

    "first run" is what follows compiling: the call with its check against eager, and packing.
    "imports" come before the first call.
    """
    if not runs:
        return {}
    phases = {
        p: [run["report"]["seconds"][p] for run in runs] for p in runs[0]["report"]["seconds"]
    }
    split = {
        "imports": [run["import_s"] for run in runs],
        "Dynamo": [run["tracing_s"] for run in runs],
        **{phase: seconds for phase, seconds in phases.items() if any(seconds)},
        "first run": [run["first_call_s"] - run["compiling_s"] for run in runs],
    }
    return {what: statistics.median(seconds) for what, seconds in split.items()}


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
        preload=OURS if ours else THEIRS,
        rounds=10,
        min_seconds=0.5,
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coldstart", description=__doc__)
    parser.add_argument("--networks", type=network_names, default=list(SEVEN), metavar="NAME,...")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--backend", default="pruner")
    parser.add_argument("--against", default="inductor")
    add_tuning(parser, cache=False)
    parser.set_defaults(effort="none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=1800.0, metavar="SECONDS")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/coldstart.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
