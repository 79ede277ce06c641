"""Every network of the papers through the backend: does it compile, agree with eager, and pay off?

Each network and precision runs in a process of its own, so that a crash or a hang is a row of the
table and not the end of it. Rows are written as they come; a run that was interrupted goes on where
it stopped, as long as code and options are the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import reports, tables, timing
from benchmarks.arguments import add_tuning, backend_options, network_names
from benchmarks.job import Job, launch
from benchmarks.models import NETWORKS
from benchmarks.rows import refresh

TIMED_AGAINST = ("eager", "inductor")


@dataclass(frozen=True, slots=True)
class Plan:
    """One row to produce."""

    job: Job
    warm: bool
    time_limit_s: float

    @property
    def key(self) -> str:
        """Rows with equal keys answer the same question, whatever the code."""
        job = self.job
        return f"{job.network}/{job.precision}/batch{job.batch}/layers{job.layers or 'default'}"

    @property
    def settings(self) -> dict[str, Any]:
        """What besides the code must be equal for an old row to be kept."""
        settings = json.loads(self.job.to_json())
        return settings | {"warm": self.warm}


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    plans = _plans(options)
    content = refresh(options.data, plans, produce, force=options.force)
    rows = [content["rows"][plan.key] for plan in plans]
    text = render(content, options)
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(text)
    else:
        print("\n" + text)
    return 0 if all(row["status"] == "ok" for row in rows) else 1


def produce(plan: Plan) -> dict[str, Any]:
    """Runs one plan: the cold process and, if asked for, a second one that finds the cache warm."""
    job = plan.job
    network = NETWORKS[job.network]
    row = launch(job, time_limit_s=plan.time_limit_s)
    row |= {
        "title": network.title,
        "precision": job.precision,
        "batch": job.batch,
        "layers": job.layers or network.default_layers or network.depth,
        "depth": network.depth,
        "commit": timing.machine()["commit"],
    }
    if plan.warm and row["status"] == "ok":
        again = replace(job, options={**job.options, "on_miss": "error"}, against=())
        row["warm"] = warm = launch(again, time_limit_s=plan.time_limit_s)
        if warm["status"] != "ok":
            row |= {"status": f"warm {warm['status']}", "error": warm["error"]}
    return row


def render(content: dict[str, Any], options: argparse.Namespace) -> str:
    """The Markdown page: what was measured, on what, and one line per row."""
    rows = sorted(content["rows"].values(), key=_order)
    timed = any("latency" in row for row in rows)
    warm = any("warm" in row for row in rows)
    header = ["network", "batch", "precision", "layers", "result", "difference", "operators"]
    header += ["FLOPs", "kernels", "first call"]
    header += ["warm first call"] if warm else []
    header += [*TIMED_AGAINST, "ours", *(f"vs {name}" for name in TIMED_AGAINST)] if timed else []
    lines = [
        [
            *_identity(row),
            *_coverage(row),
            *([_warm(row)] if warm else []),
            *(_latencies(row) if timed else []),
        ]
        for row in rows
    ]
    failures = [
        f"* {row['title']}, {row['precision']}, batch {row['batch']}: {_failure(row)}"
        for row in rows
        if row["status"] != "ok"
    ]
    machine = content["machine"] if "machine" in content else timing.machine()
    parts = [
        "# Networks",
        f"Written by `python -m benchmarks.networks`; all numbers are in `{options.data}`.",
        timing.machine_line(machine) + ".",
        LEGEND,
        tables.markdown(header, lines),
    ]
    if failures:
        parts += ["## What failed", "\n".join(failures)]
    return "\n\n".join(parts) + "\n"


LEGEND = """\
* **difference**: largest `max|ours - reference| / max|reference|` over all outputs. float32: the \
reference is eager, the bound 1e-3. bfloat16: the reference is eager in float32 with the same \
weights; eager's own difference in bfloat16 stands in brackets, and the bound is twice that or \
2e-2, whichever is larger.
* **operators**, **FLOPs**: share of operators and of floating-point work that was compiled.
* **kernels**: kinds of kernel: tuned + from the cache + from the library + untuned.
* **layers**: built / of the full network. Layers repeat, so the kernels are the same.
* Latencies are medians of one process in which the candidates take turns."""


def _order(row: dict[str, Any]) -> tuple[int, int, str]:
    return (list(NETWORKS).index(row["settings"]["network"]), row["batch"], row["precision"])


def _identity(row: dict[str, Any]) -> list[str]:
    layers = f"{row['layers']} / {row['depth']}" if row["depth"] else ""
    return [row["title"], str(row["batch"]), row["precision"], layers, row["status"]]


def _coverage(row: dict[str, Any]) -> list[str]:
    if "difference" not in row:
        return [""] * 5
    difference = f"{row['difference']:.1e}"
    if row["precision"] != "float32":
        difference += f" ({row['eager_difference']:.1e})"
    first = f"{row['first_call_s']:.1f} s"
    report = row["report"]
    if report is None:
        return [difference, "", "", "", first]
    counts = " + ".join(str(report["tasks"].get(source, 0)) for source in reports.SOURCES)
    return [
        difference,
        f"{100 * reports.ops_share(report):.1f} %",
        f"{100 * reports.flops_share(report):.2f} %",
        counts,
        first,
    ]


def _warm(row: dict[str, Any]) -> str:
    if "warm" not in row:
        return ""
    return f"{row['warm']['first_call_s']:.1f} s" if row["warm"]["status"] == "ok" else "failed"


def _latencies(row: dict[str, Any]) -> list[str]:
    if "latency" not in row:
        return [""] * 5
    backend = row["settings"]["backend"]
    median = {name: t["median_s"] for name, t in row["latency"].items()}
    ours = median[backend]
    return [
        *(timing.duration(median[name]) for name in (*TIMED_AGAINST, backend)),
        *(f"{median[name] / ours:.2f}x" for name in TIMED_AGAINST),
    ]


def _failure(row: dict[str, Any]) -> str:
    if row["status"].endswith("mismatch"):
        return f"differs by {row['difference']:.1e}, bound {row['bound']:.1e}"
    return f"{row['status']}: {row['error']}"


def _plans(options: argparse.Namespace) -> list[Plan]:
    plans = []
    for name in options.only or [n.name for n in NETWORKS.values() if n.in_papers]:
        network = NETWORKS[name]
        for precision in options.precision or network.precisions:
            job = Job(
                network=name,
                precision=precision,
                batch=options.batch,
                layers=options.layers if network.depth else None,
                backend=options.backend,
                options=backend_options(options) if options.backend == "pruner" else {},
                threads=options.threads,
                against=TIMED_AGAINST if options.bench else (),
                rounds=options.rounds,
            )
            plans.append(Plan(job, options.warm, options.time_limit))
    return plans


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.networks", description=__doc__)
    parser.add_argument("--only", type=network_names, metavar="NAME,...")
    parser.add_argument(
        "--precision",
        action="append",
        choices=["float32", "bfloat16", "float16"],
        help="instead of those of the tables; may be repeated",
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, help="build language models with so many layers")
    parser.add_argument("--backend", default="pruner")
    add_tuning(parser)
    parser.add_argument("--bench", action="store_true", help="time eager, inductor and ours")
    parser.add_argument("--warm", action="store_true", help="a second process must find the cache")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=3600.0, metavar="SECONDS", help="a row")
    parser.add_argument("--force", action="store_true", help="make rows again that are up to date")
    parser.add_argument("--data", default="docs/data/networks.json")
    parser.add_argument("--out", help="write the Markdown page there, e.g. docs/networks.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
