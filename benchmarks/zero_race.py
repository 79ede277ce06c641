"""How good the first choice is beside the best known schedules, all of a task timed in turns.

    python -m benchmarks.zero_race docs/data/records/zen4-avx512-2.jsonl.xz [--data FILE]

``benchmarks.zero`` divides times of records, which were taken minutes apart, and of dozens of noisy
times the least is a lucky one. Here the first choice and the ``--known`` fastest of each task's
records run in turns, in several races. Each race judges the one that was the best known in the
others, so luck does not count; a first choice that is faster than all of them has more than 1. Of
the races the median counts: a processor that changes its speed within one spoils it. Only tasks of
this machine's target are timed; nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import records, regret, tables, timing
from benchmarks.arguments import read_json, write_json
from benchmarks.regret import geometric_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.pools import Pool
    from torch_pruner.task import Candidate
    from torch_pruner.tuner.measure.base import MeasureExecutor

KNOWN, RACES, WORST = 4, 3, 10
Seconds = list[float]  # of a race: the first choice's, then those of the best known


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    rows: dict[str, list[Seconds]] = (read_json(options.data) or {}).get("rows", {})
    from torch_pruner.target import TargetSpec
    from torch_pruner.tuner.measure.local import LocalExecutor

    mcpu = TargetSpec.resolve("auto").mcpu
    with LocalExecutor(options.threads) as executor:
        for key, pool in _pools(options.records, mcpu, options.threads):
            if key not in rows:
                rows[key] = race(pool, contenders(pool, options.known), executor)
                write_json(options.data, {"machine": timing.machine(), "rows": rows})
                print(f"{key}: {reached(rows[key]):.3f}", flush=True)
    print(render(rows))
    return 0


def contenders(pool: Pool, known: int) -> list[Candidate]:
    """The first choice, then the fastest ``known`` of the records that are other schedules."""
    from torch_pruner.compiler.drafting import draft

    first = draft(pool.task)
    fastest = sorted(pool.results, key=lambda r: r.latency_s)
    return [first, *[r.candidate for r in fastest if r.candidate != first][:known]]


def race(pool: Pool, some: Sequence[Candidate], executor: MeasureExecutor) -> list[Seconds]:
    """Seconds of each in every race; infinite for what failed."""
    from torch_pruner.task import MeasureInput

    inputs = [MeasureInput(pool.task, c) for c in some]
    return [[r.latency_s for r in executor.race(inputs)] for _ in range(RACES)]


def reached(races: Sequence[Seconds]) -> float:
    """The best known's seconds over the first choice's, in the median over the races.

    The best known is that of the other races. Raises ``ValueError`` where the first choice failed.
    """
    ratios = []
    for at, judged in enumerate(races):
        others = np.log([r for k, r in enumerate(races) if k != at]).mean(axis=0)
        best = 1 + int(np.argmin(others[1:]))
        if not math.isfinite(judged[0]):
            raise ValueError("the first choice failed")
        ratios.append(judged[best] / judged[0])
    return statistics.median(ratios)


def render(rows: dict[str, list[Seconds]]) -> str:
    """The figure over all tasks, and the worst ones, as Markdown."""
    found = {key: reached(rounds) for key, rounds in rows.items()}
    worst = sorted(found, key=found.__getitem__)[:WORST]
    cells = [
        [key, f"{found[key]:.3f}", *(", ".join(map(timing.duration, r)) for r in rows[key])]
        for key in worst
    ]
    least = min(found.values(), default=math.nan)
    total = f"{len(found)} tasks: {geometric_mean(found.values()):.3f} (worst {least:.2f})"
    header = ["task", "of the best known", *["first choice, best known"] * RACES]
    return f"{total}\n\n{tables.markdown(header, cells)}"


def _pools(paths: Sequence[str], mcpu: str, threads: int) -> Iterator[tuple[str, Pool]]:
    measured, _ = records.read(map(Path, paths))
    for one in measured:
        alike = one.task.target.mcpu == mcpu and one.task.threads == threads
        pool = regret.usable(one).pool if alike else None
        if pool is not None:
            yield f"{one.task.name} ({one.task.workload[:4]})", pool


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero_race", description=__doc__)
    parser.add_argument("records", nargs="+")
    parser.add_argument("--known", type=int, default=KNOWN, help="schedules of each task's records")
    parser.add_argument("--threads", type=int, default=2, help="tasks for so many are timed")
    parser.add_argument("--data", help="write the figures there, as JSON; rows that are there stay")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
