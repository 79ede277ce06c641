"""A cold process that serves: when it answers first, and how fast until everything is tuned.

For every network, fresh processes with empty caches in turns: one that captures and runs eager
(``aot_eager``: what Dynamo takes), inductor, this backend blocking, and this backend compiling in
the background, which is asked for one request after the other all the while.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from benchmarks import tables, timing
from benchmarks.arguments import add_tuning, backend_options, network_names, write_json
from benchmarks.background_job import ServingJob
from benchmarks.job import launch_cold

WAYS = ("aot_eager", "inductor", "blocking", "background")


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    results: dict[str, Any] = {}
    for name in options.networks:
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
        for number in range(1, options.rounds + 1):
            for way in options.ways:
                print(f"{name}, round {number}, {way} ...", end=" ", flush=True)
                runs[way].append(run := _cold(_job(name, way, options), options))
                print(f"{run['status']} {run['error']}".rstrip(), flush=True)
        results[name] = runs
    print("\n" + render(results))
    write_json(options.out, {"machine": timing.machine(), "networks": results})
    failed = any(r["status"] != "ok" for of in results.values() for rs in of.values() for r in rs)
    return 1 if failed else 0


def _cold(job: ServingJob, options: argparse.Namespace) -> dict[str, Any]:
    return launch_cold(job, time_limit_s=options.time_limit, module="benchmarks.background_job")


def render(results: dict[str, Any]) -> str:
    """A table of medians over the rounds, and a line for every state of serving."""
    header = ["network", "way", "first call", "eager", "everything there", "then, per call"]
    rows, lines = [], []
    for name, of in results.items():
        for way, runs in of.items():
            good = [run for run in runs if run["status"] == "ok"]
            if not good:
                rows.append([name, way, runs[0]["status"], "", "", ""])
                continue
            done = _median(good, "done_s") if "done_s" in good[0] else None
            rows.append(
                [
                    name, way, timing.duration(_median(good, "first_call_s")),
                    timing.duration(_median(good, "eager_s")),
                    "" if done is None else timing.duration(done),
                    timing.duration(_median(good, "steady_s")),
                ]
            )  # fmt: skip
            if way == "background":
                lines += _states(name, good)
    return "\n".join([tables.markdown(header, rows), "", *lines])


def _states(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """What ran from when on, in the median of the rounds, and how fast beside eager."""
    lines = []
    for state in runs[0]["since_s"]:
        seen = [run for run in runs if state in run["since_s"]]
        since, median, mean, worst = (
            statistics.median(run[key][state] for run in seen)
            for key in ("since_s", "median_s", "mean_s", "slowest_s")
        )
        rate = statistics.median(run["eager_s"] / run["mean_s"][state] for run in seen)
        lines.append(
            f"* {name}: {state} from {since:.1f} s on, {rate:.2f} of eager's rate; median"
            f" {timing.duration(median)}, mean {timing.duration(mean)}, slowest"
            f" {timing.duration(worst)}"
        )
    return lines


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def _job(name: str, way: str, options: argparse.Namespace) -> ServingJob:
    ours = way in ("blocking", "background")
    return ServingJob(
        network=name,
        backend="pruner" if ours else way,
        options=backend_options(options) | {"compile": way, "strict": True} if ours else {},
        threads=options.threads,
        layers=options.layers,
        pause_s=options.pause,
        limit_s=options.limit,
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.background", description=__doc__)
    parser.add_argument("--networks", type=network_names, default=["bert_tiny"], metavar="NAME,...")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="after a call")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="of serving")
    add_tuning(parser, cache=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/background.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
