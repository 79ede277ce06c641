"""Trains the pattern-aware cost model on measured records and says how well it ranks new tasks.

Whole workloads are held out, each in one of ``--folds`` parts, so every task is judged by weights
that have not seen it. Top-k is the best latency over the best among the k that a model likes most;
best-after-n follows a search that measures eight at a time and lets the model learn. Where the best
were timed twice, their first times are asked for, too: no model can be expected to know more. With
``--out``, weights trained on everything are written, and beside them their data card; on everything
but the tasks of that benchmark with ``--leave-out docs/data/search.json``.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import card, records, tables, timing
from benchmarks.arguments import write_json
from benchmarks.pools import BATCH, FIRST, Pool, load, replay, workloads_of
from torch_pruner.tuner.cost_model import network
from torch_pruner.tuner.cost_model.analytic import AnalyticModel
from torch_pruner.tuner.cost_model.features import decisions_of
from torch_pruner.tuner.cost_model.moa import MomentumModel
from torch_pruner.tuner.cost_model.pacm import PatternAwareModel
from torch_pruner.tuner.cost_model.pattern import STATEMENT as STATEMENT_SIZE
from torch_pruner.tuner.cost_model.pattern import VERSION, patterns
from torch_pruner.tuner.cost_model.residual import ResidualModel
from torch_pruner.tuner.cost_model.training import (
    MAX_LISTED,
    Adam,
    Scaling,
    TaskList,
    train_step,
)
from torch_pruner.tuner.cost_model.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch_pruner.tuner.cost_model.base import CostModel

STATEMENT, FLOW = "statement", "flow"
FEATURES: Mapping[str, Collection[str]] = {
    "": (),
    " without flow features": (FLOW,),
    " without statement features": (STATEMENT,),
}
ONCE = "the candidates' own first times"  # what noise leaves to a model that knows all
BATCHES = 3  # of the search after the first: 4, 12, 20 and 28 candidates measured


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    pools, damaged = load(Path(p) for p in options.records)
    left_out = workloads_of(options.leave_out)
    pools = [p for p in pools if p.task.workload not in left_out]
    count = sum(len(p.results) for p in pools)
    print(f"{count} records of {len(pools)} tasks; {damaged} damaged lines", flush=True)
    rows = evaluate(pools, options) if options.folds > 1 else {}
    text = [
        [name, *_cells(row["top"], 2), *_cells(row["best"], BATCHES + 1)]
        for name, row in rows.items()
    ]
    steps = [f"best@{FIRST + BATCH * i}" for i in range(BATCHES + 1)]
    table = tables.markdown(["held-out tasks", "top-1", "top-5", *steps], text)
    print(table)
    again = timed_again(pools)
    print("second times over first:", ", ".join(f"{k} {v:.3f}" for k, v in again.items()))
    content = {"records": count, "tasks": len(pools), "second over first": again, "models": rows}
    write_json(options.data, content)
    if options.out:
        out = Path(options.out)
        out.write_bytes(train(pools, options.steps, options.seed).to_bytes())
        out.with_suffix(".md").write_text(_card(pools, options, out, table if rows else ""))
        print(f"weights of {count} records in {out}, their card in {out.with_suffix('.md')}")
    return 0


def _card(pools: Sequence[Pool], options: argparse.Namespace, weights: Path, table: str) -> str:
    settings = ("steps", "seed", "folds", "seeds")
    flags = " ".join(f"--{name} {getattr(options, name)}" for name in settings)
    names = " ".join(Path(r).name for r in options.records)
    made = {
        "model": f"pattern-aware network, {network.SIZE} parameters, features {VERSION}",
        "command": f"`python -m benchmarks.train {names} {flags} --out {weights.name}`",
        "records by": "`python -m benchmarks.collect`, in docs/data/records",
        "on": timing.machine_line(timing.machine()),
        "license": "as the package: Apache-2.0",
    }
    return card.render(pools, weights.read_bytes(), made, table)


def _cells(values: Sequence[float], width: int) -> list[str]:
    """Figures of one row; blanks where a model was not asked."""
    return [f"{v:.3f}" for v in values] or [""] * width


def train(
    pools: Sequence[Pool],
    steps: int,
    seed: int,
    *,
    without: Collection[str] = (),
    prior: bool = True,
) -> Weights:
    """Weights from nothing, the rate falling to zero; every batch holds four tasks.

    ``without`` names features that the network never gets to see: STATEMENT, FLOW. Without
    ``prior`` it learns to rank by itself, and not to correct the draft model.
    """
    rng, optimiser = np.random.default_rng(seed), Adam()
    lists = [_lists(pool, rng) for pool in pools]
    if not prior:
        for own in (own for parts in lists for own in parts):
            own.prior = np.zeros_like(own.prior)
    scaling = _blinded(Scaling.fit(own for parts in lists for own in parts), without)
    flat, rate = network.initial(rng), optimiser.rate
    for step in range(steps):
        optimiser.rate = rate * (1 - step / steps)
        some = [lists[i] for i in rng.permutation(len(lists))[:4]]
        batch = [parts[rng.integers(len(parts))] for parts in some]
        train_step(flat, optimiser, batch, scaling, rng)
    return Weights(flat, scaling, steps)


def _lists(pool: Pool, rng: np.random.Generator) -> list[TaskList]:
    """All records of a task, in random parts: a list keeps the last MAX_LISTED only."""
    order, found = rng.permutation(len(pool.results)), []
    for part in np.array_split(order, -(-len(order) // MAX_LISTED)):
        own = TaskList()
        for name, sketch in pool.sketches.items():
            some = [r for i in part if (r := pool.results[i]).candidate.sketch == name]
            if some:
                decisions = decisions_of(sketch, (r.candidate for r in some))
                own.add(patterns(pool.task, sketch, decisions), [r.latency_s for r in some])
        found.append(own)
    return found


def _blinded(scaling: Scaling, without: Collection[str]) -> Scaling:
    """What is divided by infinity is zero, whatever it was."""

    def of(moments: np.ndarray, name: str) -> np.ndarray:
        return (
            np.stack([moments[0], np.full_like(moments[1], np.inf)]) if name in without else moments
        )

    return Scaling(of(scaling.statement, STATEMENT), of(scaling.token, FLOW))


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
        trained = {
            name: train(learn, options.steps, options.seed, without=without)
            for name, without in FEATURES.items()
        }
        for name, make in fixed_models(trained, learn).items():
            top.setdefault(name, []).extend(_top(p, make) for p in test)
        top.setdefault(ONCE, []).extend(_top(p, _measured_before) for p in test if p.earlier)
        for name, start in online_models(trained).items():
            for seed in range(options.seeds):
                best.setdefault(name, []).extend(best_after(test, start(seed), seed))
        print(f"fold {fold + 1}/{options.folds}: {len(test)} held out", flush=True)
    names = [n for n in dict.fromkeys([*top, *best]) if top.get(n) or best.get(n)]
    return {
        name: {
            "top": np.mean(top[name], axis=0).tolist() if top.get(name) else [],
            "best": np.exp(np.mean(np.log(best[name]), axis=0)).tolist() if name in best else [],
        }
        for name in names
    }


def fixed_models(trained: Mapping[str, Weights], learn: Sequence[Pool]) -> dict[str, Any]:
    """Scorers that learned nothing of the tasks they are asked about."""
    from benchmarks import baselines

    def by(model: CostModel) -> Callable[[Pool], np.ndarray]:
        return lambda pool: pool.scores(model, pool.results)

    rows = [(_features(p), np.array([r.latency_s for r in p.results])) for p in learn]
    found = {"analytic": by(AnalyticModel())}
    for name, weights in trained.items():
        model = MomentumModel(0, weights, learn=False, local=False)
        found[f"network, offline{name}"] = by(model)
    for name, fit in baselines.AVAILABLE.items():
        scorer = fit(rows)
        found[name] = lambda pool, scorer=scorer: scorer(_features(pool))
    return found


def online_models(trained: Mapping[str, Weights]) -> dict[str, Callable[[int], CostModel]]:
    """Models that learn during the search, by the seed they get."""

    def adapted(weights: Weights) -> Callable[[int], CostModel]:
        return lambda seed: MomentumModel(seed, weights)

    weights = trained[""]
    return {
        "analytic": lambda seed: AnalyticModel(),
        "residual": lambda seed: ResidualModel(),
        "pacm": PatternAwareModel,
        "moa, offline": lambda seed: MomentumModel(seed, weights, learn=False),
        **{f"moa{name}": adapted(own) for name, own in trained.items()},
    }


def _features(pool: Pool) -> np.ndarray:
    """The statement features of all results, in order."""
    found = np.zeros((len(pool.results), STATEMENT_SIZE))
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


def _measured_before(pool: Pool) -> np.ndarray:
    """Of every candidate, the first time that it was measured."""
    first = [pool.earlier.get(r.candidate, r) for r in pool.results]
    return -np.array([r.latency_s for r in first])


def timed_again(pools: Sequence[Pool]) -> dict[str, float]:
    """Second times over first ones: geometric mean, median, spread of the logarithm, how many."""
    ratios = [
        math.log(r.latency_s / first.latency_s)
        for pool in pools
        for r in pool.results
        if (first := pool.earlier.get(r.candidate)) and first.run_secs and r.run_secs
    ]
    some = np.array(ratios or [0.0])
    mean, median = np.exp(some.mean()), np.exp(np.median(some))
    found = {"mean": float(mean), "median": float(median), "spread": float(some.std())}
    return {**found, "times": len(ratios)}


def best_after(pools: Sequence[Pool], model: CostModel, seed: int) -> list[list[float]]:
    """Best of the pool over best found, after each turn of a replayed search."""
    found = replay(pools, model, seed, BATCHES + 1)
    trials = [FIRST + BATCH * i for i in range(BATCHES + 1)]
    return [
        [pool.best_s / own[min(n, len(own)) - 1] for n in trials]
        for pool, own in zip(pools, found, strict=True)
    ]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("records", nargs="+", help="files that benchmarks.collect wrote")
    parser.add_argument("--out", help="write weights trained on all records (safetensors)")
    parser.add_argument("--data", help="write the figures there, as JSON")
    parser.add_argument("--leave-out", metavar="FILE", help="the tasks of these benchmarks.search")
    parser.add_argument("--folds", type=int, default=3, help="1: no evaluation")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1, help="of each search")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
