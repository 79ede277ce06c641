"""How fast the draft model scores, and whether what it drafts holds the best that was measured.

    python -m benchmarks.draft RECORDS.jsonl ... [--share 0.128]

Best-1 of a task: the least latency of its records over the least among the ``--share`` of them that
the draft model likes most, 512 of 4000 unless told otherwise. The rate is of one thread, with the
points already there as integers; it is taken for every sketch of every task in the records.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import tables
from benchmarks.arguments import write_json
from benchmarks.pools import Pool, load
from torch_pruner.tuner.cost_model.analytic import AnalyticModel
from torch_pruner.tuner.search.space import SketchSpace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import Task

SHARE = 512 / 4000
POINTS = 8192
REPEATS = 5


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    pools, damaged = load(Path(p) for p in options.records)
    if not pools:
        print("no usable records; make some with benchmarks.collect")
        return 2
    rows = [row_of(pool, options.share, options.seed) for pool in pools]
    cells = [
        [r["name"], str(r["measured"]), str(r["drafted"]), f"{r['best1']:.3f}", _rates(r["rates"])]
        for r in rows
    ]
    headers = ["task", "measured", "drafted", "Best-1", "points scored per second"]
    print(tables.markdown(headers, cells))
    mean = statistics.fmean(r["best1"] for r in rows)
    print(f"\nmean Best-1 of {len(rows)} tasks: {mean:.3f}; {damaged} damaged lines")
    write_json(options.data, {"share": options.share, "mean_best1": mean, "tasks": rows})
    return 0


def row_of(pool: Pool, share: float, seed: int) -> dict[str, Any]:
    """Best-1 and, by sketch, points scored per second of one task."""
    drafted = max(1, round(share * len(pool.results)))
    rng = np.random.default_rng(seed)
    return {
        "name": pool.task.name,
        "measured": len(pool.results),
        "drafted": drafted,
        "best1": best1(pool, drafted),
        "rates": {name: rate(pool.task, s, rng) for name, s in pool.sketches.items()},
    }


def best1(pool: Pool, drafted: int) -> float:
    """The pool's best latency over the best of the ``drafted`` that the draft model likes most."""
    latency = np.array([r.latency_s for r in pool.results])
    order = np.argsort(-pool.scores(AnalyticModel(), pool.results), kind="stable")
    return float(pool.best_s / latency[order[:drafted]].min())


def rate(task: Task, sketch: Sketch, rng: np.random.Generator) -> float:
    """Points that the draft model scores per second of processor time: the median of repeats."""
    space, model = SketchSpace(sketch), AnalyticModel()
    rows = space.random(POINTS, rng)
    decisions = space.decisions(np.resize(rows, (POINTS, rows.shape[1])))
    taken = []
    for _ in range(REPEATS):
        begin = time.process_time()
        model.predict(task, sketch, decisions)
        taken.append(time.process_time() - begin)
    return POINTS / max(statistics.median(taken), 1e-9)


def _rates(rates: dict[str, float]) -> str:
    return ", ".join(f"{name} {value / 1e3:,.0f} k" for name, value in rates.items())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft", description=__doc__)
    parser.add_argument("records", nargs="+", help="files that benchmarks.collect wrote")
    parser.add_argument("--share", type=float, default=SHARE, help="of the records, drafted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="write the figures there, as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
