"""What a search at full effort in the background costs requests: latency beside it and without it.

One process with an empty cache serves one request after the other. From when drafted kernels run,
windows of half a second are told apart by whether the processes that tune used the processor in
them: they rest while requests come (``background.resting``).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import tables, timing
from benchmarks.arguments import add_tuning, backend_options, network_names, write_json
from benchmarks.job import ProcessJob, answer_with, launch_cold

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW_S = 0.5
AT_WORK = 0.1  # of a core: below it nobody tunes in a window, above three times as much they do
READY_S = 180.0  # until drafted kernels run


@dataclass(frozen=True, slots=True)
class BesideJob(ProcessJob):
    """A network, and requests for so many seconds with ``pause_s`` between two."""

    network: str
    seconds: float = 120.0
    pause_s: float = 0.01


def started_by_us() -> dict[int, float]:
    """Seconds of processor time of each process below this one."""
    from torch_pruner.background.resting import cpu_seconds

    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended meanwhile
            parents[int(entry.name)] = int(fields[1])
    found, below = {}, {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= new
    for pid in below - {os.getpid()}:
        if (used := cpu_seconds(pid)) is not None:
            found[pid] = used
    return found


def window(call: Callable[[], object], pause_s: float) -> dict[str, Any]:
    """Latencies of half a second, and how much of a core others of ours used meanwhile."""
    before, begin, latencies = started_by_us(), time.perf_counter(), []
    while time.perf_counter() - begin < WINDOW_S:
        start = time.perf_counter()
        call()
        latencies.append(time.perf_counter() - start)
        time.sleep(pause_s)
    used = sum(max(0.0, now - before.get(pid, now)) for pid, now in started_by_us().items())
    return {"latencies_s": latencies, "cores": used / (time.perf_counter() - begin)}


def run(job: BesideJob) -> dict[str, Any]:
    """Windows until the time is over or nothing is pending any more."""
    import torch

    import torch_pruner
    from benchmarks import models

    job.use_threads()
    module, inputs = models.load(job.network, torch.float32)
    with torch.no_grad():
        compiled = torch.compile(module, backend="pruner", dynamic=False, options=job.options)

        def call() -> object:
            return models.call(compiled, inputs)

        begin = time.perf_counter()
        call()
        while not _drafted():
            call()
            if time.perf_counter() - begin > READY_S or torch_pruner.wait(0.0):
                raise RuntimeError("drafted kernels never ran, or nothing was left to tune")
        begin, windows = time.perf_counter(), []
        while time.perf_counter() - begin < job.seconds and not torch_pruner.wait(0.0):
            windows.append(window(call, job.pause_s))
    return {"status": "ok", "windows": windows}


def _drafted() -> bool:
    import torch_pruner

    report = torch_pruner.last_report()
    return report is not None and all("draft" in graph.runs for graph in report.graphs)


def summary(windows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians and means of seconds, of all requests and of those beside which nobody tuned."""
    calm = [w for w in windows if w["cores"] < AT_WORK]
    tuning = [w for w in windows if w["cores"] > 3 * AT_WORK]
    found = {"windows": float(len(windows)), "tuning": len(tuning) / max(1, len(windows))}
    for name, some in (("all", windows), ("calm", calm), ("beside", tuning)):
        if latencies := [s for w in some for s in w["latencies_s"]]:
            found[f"{name}_median_s"] = statistics.median(latencies)
            found[f"{name}_mean_s"] = statistics.mean(latencies)
    return found


def render(results: dict[str, Any]) -> str:
    header = ["network", "windows", "tuned in", "calm", "beside tuning", "all", "all over calm"]
    rows = []
    for name, result in results.items():
        if result["status"] != "ok" or "calm_mean_s" not in result["summary"]:
            rows.append([name, result["status"], "", "", "", "", ""])
            continue
        s = result["summary"]
        means, medians = (s[f"all_{k}_s"] / s[f"calm_{k}_s"] for k in ("mean", "median"))
        beside = timing.duration(s["beside_mean_s"]) if "beside_mean_s" in s else ""
        rows.append(
            [
                name, f"{s['windows']:.0f}", f"{100 * s['tuning']:.0f} %",
                timing.duration(s["calm_mean_s"]), beside, timing.duration(s["all_mean_s"]),
                f"{means:.2f} (medians {medians:.2f})",
            ]
        )  # fmt: skip
    return tables.markdown(header, rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside_tuning", description=__doc__)
    parser.add_argument("--networks", type=network_names, default=["bert_tiny"], metavar="NAME,...")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--pause", type=float, default=0.01, metavar="SECONDS", help="after a call")
    add_tuning(parser, cache=False)
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/beside_tuning.json")
    options = parser.parse_args(arguments)
    settings = backend_options(options) | {"compile": "background", "effort": "full"}
    results: dict[str, Any] = {}
    for name in options.networks:
        job = BesideJob(
            name, options.seconds, options.pause, options=settings, threads=options.threads
        )
        found = launch_cold(job, time_limit_s=options.time_limit, module="benchmarks.beside_tuning")
        if windows := found.pop("windows", None):
            found["summary"] = summary(windows)
        results[name] = found
    print(render(results))
    write_json(options.out, {"machine": timing.machine(), "networks": results})
    return 0 if all(r["status"] == "ok" for r in results.values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):  # started by ``launch``
        given = BesideJob.from_json(sys.argv[1])
        answer_with(lambda: run(given), Path(sys.argv[2]))
    else:
        sys.exit(main())
