"""Trains the generator of schedules on records, and says how good what it likes is on new tasks.

    python -m benchmarks.tlm docs/data/records/*.xz --out /tmp/tlm.safetensors

First on random points of the tasks' spaces, measured or not, from which it learns what is valid;
then on the best of each task. Whole workloads are held out, each in one of ``--folds`` parts. Top-k
is the least latency of a task's records over the least of the k that the generator finds likeliest;
the draft model's ranking, and both together, stand beside. ``valid`` is the share of what it writes
that can be built, ``known`` that of valid points that are among the records.

The generator of ``--out`` sees all records but those of ``--leave-out docs/data/search.json``, and
is improved in ``--rounds``: what it writes of the tasks whose records are this machine's is
measured (nothing else may run then), and it learns from the best of it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import records, tables, tlm_rounds
from benchmarks.arguments import write_json
from benchmarks.pools import load, workloads_of
from benchmarks.regret import geometric_mean
from benchmarks.tlm_learning import Known, train
from torch_pruner.tuner.cost_model.analytic import log_latency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.tuner.generator.model import Generator

TOP = (1, 5, 10)
WRITTEN = 64  # sentences a task that are looked at
BOTH = 0.25  # of the generator's logarithm, added to the draft model's


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    pools, damaged = load(Path(p) for p in options.records)
    left_out = workloads_of(options.leave_out)
    pools = [p for p in pools if p.task.workload not in left_out]
    known = [k for p in pools if np.isfinite((k := Known.of(p)).best_s)]
    print(f"{len(known)} tasks; {damaged} damaged lines", flush=True)
    rows = evaluate(known, options) if options.folds > 1 else {}
    if rows:
        text = [[name, *(f"{v:.3f}" for v in row)] for name, row in rows.items()]
        print(tables.markdown(["held-out tasks", *(f"top-{k}" for k in TOP)], text))
    gains: list[list[float]] = []
    if options.out:
        generator = train(known, options.random_steps, options.steps, options.seed)
        if options.rounds:
            known, gains = _improved(generator, known, options)
        Path(options.out).write_bytes(generator.to_bytes())
        print(f"generator of {len(known)} tasks in {options.out}: {_written(generator, known)}")
    write_json(options.data, {"tasks": len(known), "models": rows, "rounds": gains})
    return 0


def _improved(
    generator: Generator, known: Sequence[Known], options: argparse.Namespace
) -> tuple[list[Known], list[list[float]]]:
    from torch_pruner.target import TargetSpec
    from torch_pruner.tuner.measure.local import LocalExecutor

    threads = known[0].pool.task.threads
    plan = tlm_rounds.Plan(
        options.rounds,
        options.written,
        options.round_steps,
        options.overlap,
        Path(options.records_out) if options.records_out else None,
    )
    rng = np.random.default_rng([options.seed, options.rounds])
    with LocalExecutor(threads, seed=options.seed) as executor:
        own = (executor.device.digest(), threads, TargetSpec.resolve("auto", threads).mcpu)
        mine = [(k.pool.digest, k.pool.task.threads, k.pool.task.target.mcpu) == own for k in known]
        if not any(mine):
            raise SystemExit("none of the records are this machine's: no round can be measured")
        print(f"{sum(mine)} tasks can be measured here", flush=True)
        known, gains = tlm_rounds.improved(generator, known, mine, executor, plan, rng)
    for number, gained in enumerate(gains):
        finite = [g for g in gained if g > 0]
        better = sum(g > 1 for g in gained)
        text = f"round {number + 1}: the best written is {geometric_mean(finite):.3f} of the best"
        print(f"{text} known before, better for {better} of {len(gained)} tasks", flush=True)
    return known, gains


def evaluate(known: Sequence[Known], options: argparse.Namespace) -> dict[str, list[float]]:
    """Geometric means over all tasks of what each ranking reaches without measuring."""
    found: dict[str, list[list[float]]] = {}
    for fold in range(options.folds):
        inside = [records.in_fold(k.pool.task.workload, options.folds, fold) for k in known]
        learn = [k for k, held in zip(known, inside, strict=True) if not held]
        test = [k for k, held in zip(known, inside, strict=True) if held]
        if not learn or not test:
            continue
        generator = train(learn, options.random_steps, options.steps, options.seed)
        for own in test:
            written, drafted, seconds = scores(generator, own)
            rankings = {
                "draft model": drafted,
                "generator": written,
                "both": drafted + BOTH * written,
            }
            for name, score in rankings.items():
                order = np.argsort(-score, kind="stable")
                best = [float(seconds.min() / seconds[order[:k]].min()) for k in TOP]
                found.setdefault(name, []).append(best)
        print(
            f"fold {fold + 1}/{options.folds}: {len(test)} held out; {_written(generator, test)}",
            flush=True,
        )
    return {
        name: [geometric_mean(row[k] for row in rows) for k in range(len(TOP))]
        for name, rows in found.items()
    }


def scores(generator: Generator, known: Known) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every measured point: the generator's logarithm, the draft model's score, the seconds."""
    written, drafted = [], []
    for i, (space, rows) in enumerate(zip(known.spaces, known.rows, strict=True)):
        if len(rows):
            written.append(generator.log_probability(known.prompt, i, rows))
            drafted.append(-log_latency(space.sketch, space.decisions(rows)))
    return np.concatenate(written), np.concatenate(drafted), np.concatenate(known.seconds)


def _written(generator: Generator, known: Sequence[Known]) -> str:
    """What of sentences written at random is valid, and what of that was measured."""
    rng = np.random.default_rng(0)
    count = valid = met = 0
    for own in known:
        for space, rows, measured in zip(
            own.spaces, generator.write(own.prompt, WRITTEN, rng), own.rows, strict=True
        ):
            good = space.valid(rows)
            count, valid = count + len(rows), valid + len(good)
            met += int(np.isin(space.keys(good), space.keys(measured)).sum())
    return f"valid {valid / max(1, count):.2f}, known {met / max(1, valid):.2f}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tlm", description=__doc__)
    parser.add_argument("records", nargs="+", help="files that benchmarks.collect wrote")
    parser.add_argument("--out", help="write a generator trained on all records (safetensors)")
    parser.add_argument("--data", help="write the figures there, as JSON")
    parser.add_argument("--folds", type=int, default=3, help="1: no evaluation")
    parser.add_argument("--random-steps", type=int, default=400, help="on random points")
    parser.add_argument("--steps", type=int, default=800, help="on the best")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leave-out", help="docs/data/search.json: not the tasks in there")
    parser.add_argument("--rounds", type=int, default=0, help="of writing, measuring, learning")
    parser.add_argument("--written", type=int, default=8, help="schedules a task and round")
    parser.add_argument("--round-steps", type=int, default=200, help="of training in a round")
    parser.add_argument(
        "--overlap", action="store_true", help="train while measuring, for a card of its own"
    )
    parser.add_argument("--records-out", help="a file of records for what rounds measure")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
