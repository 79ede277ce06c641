"""Trains the pattern-aware cost model on measured records and says how well it ranks new tasks.

Whole workloads are held out, each in one of ``--folds`` parts, so every task is judged by weights
that have not seen it. Top-k is the best latency over the best among the k that a model likes most;
best-after-n follows a search that measures eight at a time and lets the model learn. With
``--out``, weights trained on everything are written.
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
from torch_pruner.task import MeasureStatus
from torch_pruner.tuner.cost_model import network
from torch_pruner.tuner.cost_model.analytic import AnalyticModel
from torch_pruner.tuner.cost_model.features import decisions_of
from torch_pruner.tuner.cost_model.moa import MomentumModel
from torch_pruner.tuner.cost_model.pacm import PatternAwareModel
from torch_pruner.tuner.cost_model.pattern import patterns
from torch_pruner.tuner.cost_model.residual import ResidualModel
from torch_pruner.tuner.cost_model.training import Adam, Scaling, TaskList, train_step
from torch_pruner.tuner.cost_model.weights import Weights
from torch_pruner.tuner.sketch import sketches_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_pruner.task import MeasureResult, Task
    from torch_pruner.tuner.cost_model.base import CostModel
    from torch_pruner.tuner.sketch.base import Sketch

FIRST, BATCH, BATCHES = 4, 8, 3  # of the search: 4, 12, 20 and 28 candidates measured
LEAST = 16  # records of a task that is used


@dataclass(frozen=True, slots=True)
class Pool:
    """A task, its sketches and everything that was measured of it."""

    task: Task
    sketches: Mapping[str, Sketch]
    results: Sequence[MeasureResult]

    def scores(self, model: CostModel, results: Sequence[MeasureResult]) -> np.ndarray:
        found = np.zeros(len(results))
        for name, sketch in self.sketches.items():
            where = [i for i, r in enumerate(results) if r.candidate.sketch == name]
            if where:
                decisions = decisions_of(sketch, (results[i].candidate for i in where))
                found[where] = model.predict(self.task, sketch, decisions)
        return found


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    measured, damaged = records.read([Path(p) for p in options.records])
    pools = [p for m in measured if (p := pool_of(m)) is not None]
    count = sum(len(p.results) for p in pools)
    print(f"{count} records of {len(pools)} tasks; {damaged} damaged lines", flush=True)
    rows = evaluate(pools, options) if options.folds > 1 else {}
    text = [
        [name, *_cells(row["top"], 2), *_cells(row["best"], BATCHES + 1)]
        for name, row in rows.items()
    ]
    steps = [f"best@{FIRST + BATCH * i}" for i in range(BATCHES + 1)]
    print(tables.markdown(["held-out tasks", "top-1", "top-5", *steps], text))
    write_json(options.data, {"records": count, "tasks": len(pools), "models": rows})
    if options.out:
        weights = train(pools, options.steps, options.seed)
        Path(options.out).write_bytes(weights.to_bytes())
        print(f"weights of {count} records in {options.out}")
    return 0


def _cells(values: Sequence[float], width: int) -> list[str]:
    """Figures of one row; blanks where a model was not asked."""
    return [f"{v:.3f}" for v in values] or [""] * width


def pool_of(measured: records.Measured) -> Pool | None:
    """What of a task today's sketches still know; None where that is too little."""
    sketches = {s.name: s for s in sketches_for(measured.task)}
    known = []
    for result in measured.results:
        sketch = sketches.get(result.candidate.sketch)
        if sketch and set(dict(result.candidate.decisions)) == set(sketch.names):
            known.append(result)
    good = sum(r.status is MeasureStatus.OK for r in known)
    return Pool(measured.task, sketches, known) if good >= LEAST else None


def train(pools: Sequence[Pool], steps: int, seed: int) -> Weights:
    """Weights from nothing, the rate falling to zero; every batch holds four tasks."""
    lists = []
    for pool in pools:
        own = TaskList()
        for name, sketch in pool.sketches.items():
            some = [r for r in pool.results if r.candidate.sketch == name]
            if some:
                decisions = decisions_of(sketch, (r.candidate for r in some))
                own.add(patterns(pool.task, sketch, decisions), [r.latency_s for r in some])
        lists.append(own)
    rng, scaling, optimiser = np.random.default_rng(seed), Scaling.fit(lists), Adam()
    flat, rate = network.initial(rng), optimiser.rate
    for step in range(steps):
        optimiser.rate = rate * (1 - step / steps)
        some = rng.permutation(len(lists))[:4]
        train_step(flat, optimiser, [lists[i] for i in some], scaling, rng)
    return Weights(flat, scaling, steps)


def evaluate(pools: Sequence[Pool], options: argparse.Namespace) -> dict[str, Any]:
    """Mean figures over all tasks of each model that was not trained on them."""
    top: dict[str, list[Any]] = {}
    best: dict[str, list[Any]] = {}
    measured = [records.Measured(p.task, "") for p in pools]
    for fold in range(options.folds):
        _, held = records.split(measured, options.folds, fold)
        inside = [any(m is h for h in held) for m in measured]
        test = [p for p, out in zip(pools, inside, strict=True) if out]
        learn = [p for p, out in zip(pools, inside, strict=True) if not out]
        if not test or not learn:
            continue
        weights = train(learn, options.steps, options.seed)
        for name, make in fixed_models(weights, learn).items():
            top.setdefault(name, []).extend(_top(p, make) for p in test)
        for name, start in online_models(weights).items():
            for seed in range(options.seeds):
                best.setdefault(name, []).extend(search(test, start, seed))
        print(f"fold {fold + 1}/{options.folds}: {len(test)} held out", flush=True)
    names = list(dict.fromkeys([*top, *best]))
    return {
        name: {
            "top": np.mean(top[name], axis=0).tolist() if name in top else [],
            "best": np.exp(np.mean(np.log(best[name]), axis=0)).tolist() if name in best else [],
        }
        for name in names
    }


def fixed_models(weights: Weights, learn: Sequence[Pool]) -> dict[str, Any]:
    """Scorers that learned nothing of the tasks they are asked about."""
    from benchmarks import baselines

    def by(model: CostModel) -> Callable[[Pool], np.ndarray]:
        return lambda pool: pool.scores(model, pool.results)

    rows = [(_features(p), np.array([r.latency_s for r in p.results])) for p in learn]
    found = {
        "analytic": by(AnalyticModel()),
        "network, offline": by(MomentumModel(0, weights, learn=False, local=False)),
    }
    for name, fit in baselines.AVAILABLE.items():
        scorer = fit(rows)
        found[name] = lambda pool, scorer=scorer: scorer(_features(pool))
    return found


def online_models(weights: Weights) -> dict[str, Any]:
    """Models that learn during the search, by the seed they get."""
    return {
        "analytic": lambda seed: AnalyticModel(),
        "residual": lambda seed: ResidualModel(),
        "pacm": PatternAwareModel,
        "moa, offline": lambda seed: MomentumModel(seed, weights, learn=False),
        "moa": lambda seed: MomentumModel(seed, weights),
    }


def _features(pool: Pool) -> np.ndarray:
    """The statement features of all results, in order."""
    found = np.zeros((len(pool.results), network.STATEMENT))
    for name, sketch in pool.sketches.items():
        where = [i for i, r in enumerate(pool.results) if r.candidate.sketch == name]
        if where:
            decisions = decisions_of(sketch, (pool.results[i].candidate for i in where))
            found[where] = patterns(pool.task, sketch, decisions).statement
    return found


def _top(pool: Pool, scorer: Callable[[Pool], np.ndarray]) -> list[float]:
    latency = np.array([r.latency_s for r in pool.results])
    order = np.argsort(-scorer(pool), kind="stable")
    return [float(latency.min() / latency[order[:k]].min()) for k in (1, 5)]


def search(pools: Sequence[Pool], make: Callable[[int], CostModel], seed: int) -> list[list[float]]:
    """Best of the pool over best found, after each batch; tasks take turns with one model."""
    model, rng = make(seed), np.random.default_rng(seed)
    left = [[p.results[i] for i in rng.permutation(len(p.results))] for p in pools]
    found: list[list[float]] = [[] for _ in pools]
    best = [np.inf] * len(pools)
    for turn in range(BATCHES + 1):
        for k, pool in enumerate(pools):
            order = np.argsort(-pool.scores(model, left[k]), kind="stable")
            batch = [left[k][i] for i in order[: BATCH if turn else FIRST]]
            left[k] = [left[k][i] for i in order[len(batch) :]]
            model.update(pool.task, list(pool.sketches.values()), batch)
            best[k] = min([best[k], *(r.latency_s for r in batch)])
            found[k].append(min(r.latency_s for r in pool.results) / best[k])
    return found


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("records", nargs="+", help="files that benchmarks.collect wrote")
    parser.add_argument("--out", help="write weights trained on all records (safetensors)")
    parser.add_argument("--data", help="write the figures there, as JSON")
    parser.add_argument("--folds", type=int, default=3, help="1: no evaluation")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1, help="of each search")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
