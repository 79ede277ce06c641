"""Trains the generator of schedules on records, and says how good what it likes is on new tasks.

    python -m benchmarks.tlm docs/data/records/*.xz --out /tmp/tlm.safetensors

First on random points of the tasks' spaces, measured or not, from which it learns what is valid;
then on the best of each task. Whole workloads are held out, each in one of ``--folds`` parts. Top-k
is the least latency of a task's records over the least of the k that the generator finds likeliest;
the draft model's ranking, and both together, stand beside. ``valid`` is the share of what it writes
that can be built, ``known`` that of valid points that are among the records.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import records, tables
from benchmarks.arguments import write_json
from benchmarks.pools import Pool, load
from benchmarks.regret import geometric_mean
from torch_pruner.tuner.cost_model.analytic import log_latency
from torch_pruner.tuner.generator.model import Generator, optimiser
from torch_pruner.tuner.generator.sentence import Prompt
from torch_pruner.tuner.search.space import SketchSpace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.tuner.search.space import Rows

TOP = (1, 5, 10)
NEAR = 0.03  # of the best: how much slower counts by a factor of e less
LIST = 32  # sentences of a step and task
TASKS = 4  # of a step
WRITTEN = 64  # sentences a task that are looked at
BOTH = 0.25  # of the generator's logarithm, added to the draft model's


@dataclass(slots=True)
class Known:
    """A task as the generator sees it: rows and seconds of each sketch's measured points."""

    pool: Pool
    prompt: Prompt
    spaces: list[SketchSpace]
    rows: list[Rows]
    seconds: list[np.ndarray]

    @staticmethod
    def of(pool: Pool) -> Known:
        spaces = [SketchSpace(s) for s in pool.sketches.values()]
        rows, seconds = [], []
        for space in spaces:
            # Options may have gone since: what is left is looked up one by one.
            pairs = [
                (row[0], r.latency_s)
                for r in pool.results
                if r.candidate.sketch == space.sketch.name
                and len(row := space.valid(space.rows_of_candidates([r.candidate])))
            ]
            rows.append(space.rows_of([]) if not pairs else np.stack([p for p, _ in pairs]))
            seconds.append(np.array([s for _, s in pairs]))
        prompt = Prompt.of(pool.task, list(pool.sketches.values()))
        return Known(pool, prompt, spaces, rows, seconds)

    @property
    def best_s(self) -> float:
        return min(float(s.min(initial=np.inf)) for s in self.seconds)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    pools, damaged = load(Path(p) for p in options.records)
    known = [k for p in pools if np.isfinite((k := Known.of(p)).best_s)]
    print(f"{len(known)} tasks; {damaged} damaged lines", flush=True)
    rows = evaluate(known, options) if options.folds > 1 else {}
    if rows:
        text = [[name, *(f"{v:.3f}" for v in row)] for name, row in rows.items()]
        print(tables.markdown(["held-out tasks", *(f"top-{k}" for k in TOP)], text))
    write_json(options.data, {"tasks": len(known), "models": rows})
    if options.out:
        generator = train(known, options)
        Path(options.out).write_bytes(generator.to_bytes())
        print(f"generator of {len(known)} tasks in {options.out}: {_written(generator, known)}")
    return 0


def train(known: Sequence[Known], options: argparse.Namespace) -> Generator:
    """A generator from nothing, the rate falling to zero in both parts."""
    rng = np.random.default_rng(options.seed)
    generator = Generator(seed=options.seed)
    for count, batch in ((options.random_steps, _random), (options.steps, _best)):
        adam = optimiser()
        rate = adam.rate
        for step in range(count):
            adam.rate = rate * (1 - step / count)
            some = [known[i] for i in rng.permutation(len(known))[:TASKS]]
            given = [b for k in some if (b := batch(k, rng)) is not None]
            if given:
                generator.step(adam, given)
    return generator


def _random(known: Known, rng: np.random.Generator) -> tuple[Prompt, int, Rows, Any] | None:
    """Valid points of one sketch, none likelier than another."""
    i = int(rng.integers(len(known.spaces)))
    rows = known.spaces[i].random(4 * LIST, rng)[:LIST]
    return (known.prompt, i, rows, np.ones(len(rows))) if len(rows) else None


def _best(known: Known, rng: np.random.Generator) -> tuple[Prompt, int, Rows, Any] | None:
    """Measured points, drawn by how near they are to the best; of one sketch, by its share."""
    weights = [np.exp(-(s / known.best_s - 1) / NEAR) for s in known.seconds]
    totals = np.array([w.sum() for w in weights])
    i = int(rng.choice(len(totals), p=totals / totals.sum()))
    at = rng.choice(len(weights[i]), LIST, p=weights[i] / totals[i])
    return known.prompt, i, known.rows[i][at], np.ones(LIST)


def evaluate(known: Sequence[Known], options: argparse.Namespace) -> dict[str, list[float]]:
    """Geometric means over all tasks of what each ranking reaches without measuring."""
    found: dict[str, list[list[float]]] = {}
    for fold in range(options.folds):
        inside = [records.in_fold(k.pool.task.workload, options.folds, fold) for k in known]
        learn = [k for k, held in zip(known, inside, strict=True) if not held]
        test = [k for k, held in zip(known, inside, strict=True) if held]
        if not learn or not test:
            continue
        generator = train(learn, options)
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
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
