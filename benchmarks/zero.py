"""How good the first choice is, when nothing was measured: what effort "none" runs.

    python -m benchmarks.zero [RECORDS ...] [--data docs/data/zero.json]

Nothing is measured: committed records say how fast the points of each task are. Of a ranking it
says the **top-1**: the least latency of the task's records over that of the measured point which
the ranking likes most. The first choice itself, as the compiler makes it, need not be among the
points that were measured; where it is, its own figure stands beside (**first choice**).

* draft: the draft model, which alone decides at effort "none"
* released: the learned model with the package's weights, as a search without trials would use it;
  it was trained on most of these records, so that is no figure for networks that are new
* network, processor, both left out: the same network, trained here on nothing but the records of
  other networks, of other processors (or targets, or threads), or of what is other in both
* random: a point drawn at random; once: the best by its first time, judged by its second

Records of one file are compared with each other and with no others: times of two runs are not on
one scale. Kernels were timed again and again, so weights that fit a cache came from there; the
draft model prices them as they are inside a network, from memory. Products of few rows pay for it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import records, regret, tables
from benchmarks.arguments import write_json
from torch_pruner.compiler.drafting import draft
from torch_pruner.compiler.remembered.learned import SHIPPED
from torch_pruner.tuner.cost_model.analytic import AnalyticModel
from torch_pruner.tuner.cost_model.moa import MomentumModel
from torch_pruner.tuner.cost_model.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from benchmarks.pools import Pool
    from torch_pruner.task import Task

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "data" / "records"
SAMPLES = "-random"  # files of many points of few tasks, on which nothing is trained
DRAFT, RELEASED, RANDOM, ONCE = "draft", "released", "random", "once"
LEFT_OUT = {
    ("network",): "network left out",
    ("processor",): "processor left out",
    ("network", "processor"): "both left out",
}
WORST = 10
DRAFTS = 3  # how often a first choice is made to say how long it takes


@dataclass(slots=True)
class Row:
    """A task of a file: top-1 by ranking, ``exact`` the first choice's own (None: not measured)."""

    name: str
    file: str
    network: str
    family: str  # of the best known
    processor: str
    points: int
    best_s: float
    exact: float | None
    draft_s: float  # processor seconds that the first choice takes
    top: dict[str, float] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    paths = [Path(p) for p in options.records] or committed()
    names = json.loads((FOLDER / "networks.json").read_text())
    rows, pools, states = read(paths, names)
    if not rows:
        print("no usable records; make some with benchmarks.collect")
        return 2
    judge(rows, pools, options.steps, options.seed)
    print(render(rows, states))
    content = [{k: getattr(r, k) for k in Row.__slots__} for r in rows]
    write_json(options.data, {"tasks": content, "records": {k: dict(v) for k, v in states.items()}})
    return 0


def committed() -> list[Path]:
    """The committed records of CPUs."""
    return sorted(p for p in FOLDER.glob("*.xz") if not p.name.startswith("h100"))


def read(
    paths: Iterable[Path], networks: Mapping[str, str]
) -> tuple[list[Row], list[Pool], dict[str, Counter[str]]]:
    """A row and a pool per task and file, and how many results of each file are of which kind."""
    rows, pools, states = [], [], {}
    for path in paths:
        file, counts = path.name.split(".")[0], Counter[str]()
        measured, counts["damaged"] = records.read([path])
        for one in measured:
            found = regret.usable(one)
            counts += found.states
            if found.pool is not None:
                network = networks.get(one.task.workload[:16], "unknown")
                rows.append(row_of(found.pool, file, network))
                pools.append(found.pool)
        states[file] = counts
    return rows, pools, states


def row_of(pool: Pool, file: str, network: str) -> Row:
    """A task's row with what needs no training."""
    choice, seconds = first_choice(pool.task)
    latency = [r.latency_s for r in pool.results]
    own = [r.latency_s for r in pool.results if r.candidate == choice]
    task, best = pool.task, pool.results[int(np.argmin(latency))]
    processor = f"{pool.device}, {task.target.mcpu}, threads: {task.threads}"
    top = {
        DRAFT: regret.top1(latency, pool.scores(AnalyticModel(), pool.results)),
        RANDOM: regret.by_chance(latency),
    }
    if (once := regret.once(pool)) is not None:
        top[ONCE] = once
    exact = min(latency) / own[0] if own else None
    family = best.candidate.sketch
    return Row(
        task.name, file, network, family, processor, len(latency), min(latency), exact, seconds, top
    )


def first_choice(task: Task) -> tuple[Any, float]:
    """What effort "none" runs, and the least processor seconds that choosing takes."""
    taken = []
    for _ in range(DRAFTS):
        begin = time.process_time()
        choice = draft(task)
        taken.append(time.process_time() - begin)
    return choice, min(taken)


def judge(rows: Sequence[Row], pools: Sequence[Pool], steps: int, seed: int) -> None:
    """Adds what learned rankings reach; ``steps`` 0: nothing is trained."""
    released = SHIPPED / "llvm.safetensors"
    _rank(rows, pools, RELEASED, Weights.from_bytes(released.read_bytes()))
    if not steps:
        return
    from benchmarks.train import train

    teaching = [SAMPLES not in r.file for r in rows]
    for fields, name in LEFT_OUT.items():
        values = [[getattr(r, f) for f in fields] for r in rows]
        for own in dict.fromkeys(map(tuple, values)):
            # Nothing is learned from what shares a value with those that are asked about.
            other = [all(a != b for a, b in zip(own, value, strict=True)) for value in values]
            some = [i for i, value in enumerate(values) if tuple(value) == own]
            learn = [p for p, o, t in zip(pools, other, teaching, strict=True) if t and o]
            if learn:
                weights = train(learn, steps, seed)
                _rank([rows[i] for i in some], [pools[i] for i in some], name, weights)


def _rank(rows: Sequence[Row], pools: Sequence[Pool], name: str, weights: Weights) -> None:
    model = MomentumModel(0, weights, learn=False, local=False)
    for row, pool in zip(rows, pools, strict=True):
        latency = [r.latency_s for r in pool.results]
        row.top[name] = regret.top1(latency, pool.scores(model, pool.results))


def render(rows: Sequence[Row], states: Mapping[str, Counter[str]]) -> str:
    """All tables as Markdown."""
    taken = 1e3 * float(np.median([r.draft_s for r in rows]))
    worst = sorted(rows, key=lambda r: r.top[DRAFT])[:WORST]
    header = ["task", "file", "family", "best known", "draft", "first choice", RELEASED]
    cells = [
        [
            r.name, r.file, r.family, f"{r.best_s * 1e6:.0f} us", f"{r.top[DRAFT]:.3f}",
            f"{r.exact:.3f}" if r.exact is not None else "not measured", f"{r.top[RELEASED]:.3f}",
        ]
        for r in worst
    ]  # fmt: skip
    parts = [
        "Of the best known, geometric mean (worst):",
        grouped(rows, "file", lambda r: r.file),
        grouped(rows, "network", lambda r: r.network),
        grouped(rows, "family of the best known", lambda r: r.family),
        grouped(rows, "processor", lambda r: r.processor),
        f"The draft model's worst tasks. A first choice takes {taken:.1f} ms (median).",
        tables.markdown(header, cells),
        "Points of the records, and those that count today:",
        _states_table(states),
    ]
    return "\n\n".join(parts)


def grouped(rows: Sequence[Row], what: str, key: Callable[[Row], str]) -> str:
    """Geometric mean and worst of every ranking, by ``key`` and over all, as a table."""
    order = [DRAFT, RELEASED, *LEFT_OUT.values(), RANDOM, ONCE]
    names = [n for n in order if any(n in r.top for r in rows)]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    if len(groups) > 1:
        groups["all"] = list(rows)
    cells = []
    for value, some in groups.items():
        exact = [r.exact for r in some if r.exact is not None]
        line = [value, str(len(some)), f"{_cell(exact)}, n = {len(exact)}" if exact else ""]
        cells.append(line + [_cell([r.top[n] for r in some if n in r.top]) for n in names])
    return tables.markdown([what, "tasks", "first choice", *names], cells)


def _cell(ratios: Sequence[float]) -> str:
    mean = regret.geometric_mean(ratios)
    return "" if math.isnan(mean) else f"{mean:.3f} ({min(ratios):.2f})"


def _states_table(states: Mapping[str, Counter[str]]) -> str:
    stale = (regret.GONE, regret.OTHER, regret.OUTSIDE)
    names = [regret.USABLE, *stale, regret.FAILED, regret.UNBELIEVABLE]
    cells = []
    for file, counts in states.items():
        total = sum(counts[n] for n in names)
        share = sum(counts[n] for n in stale) / max(total, 1)
        cells.append([file, str(total), *(str(counts[n]) for n in names), f"{share:.1%}"])
    return tables.markdown(["file", "points", *names, "stale"], cells)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero", description=__doc__)
    parser.add_argument("records", nargs="*", help="default: those of CPUs in docs/data/records")
    parser.add_argument("--steps", type=int, default=300, help="of training; 0: none is trained")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="write the figures there, as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
