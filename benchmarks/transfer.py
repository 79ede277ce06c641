"""How many trials weights from another platform save, replayed on records of both platforms.

    python -m benchmarks.transfer avx2-1.jsonl --to avx512-2.jsonl

The goal of a task is what the model that starts from nothing has found after ``--trials`` of its
pool. Counted is how many trials each way of using the weights needs to get there, in proportion:
adapted with momentum, the same without (naive fine-tuning), and as they are (offline). "As fast"
counts the trials of both until they are within a session's tie band of the goal: what is nearer
than noise is luck. With ``--folds`` above 1 the weights have not seen the task on the other
platform either.

All is asked twice: of our models, which add to the draft model's estimate and regress on a task's
own measurements, and of the network by itself, as in the paper.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import records, tables
from benchmarks.arguments import write_json
from benchmarks.pools import BATCH, FIRST, Pool, load, replay
from benchmarks.train import train
from torch_pruner.pareto import TIE
from torch_pruner.tuner.cost_model.moa import MomentumModel
from torch_pruner.tuner.cost_model.pacm import PatternAwareModel
from torch_pruner.tuner.cost_model.residual import ResidualModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch_pruner.tuner.cost_model.base import CostModel
    from torch_pruner.tuner.cost_model.weights import Weights

    Maker = Callable[[int, Weights], CostModel]

REFERENCE = "from nothing"
ALONE = "the network alone, "


def _models(ours: bool) -> dict[str, Maker]:
    """Of one kind, ``ours`` or the paper's. The first is the reference of the others."""

    def momentum(**options: Any) -> Maker:
        return lambda seed, weights: MomentumModel(seed, weights, local=ours, prior=ours, **options)

    return {
        REFERENCE: lambda seed, weights: PatternAwareModel(seed, local=ours, prior=ours),
        "adapted with momentum": momentum(restart=True),
        "fine-tuned": momentum(momentum=0.0),
        "offline": momentum(learn=False),
    }


MODELS: Mapping[str, Maker] = {
    **_models(ours=True),
    "residual model alone": lambda seed, weights: ResidualModel(),
    **{ALONE + name: make for name, make in _models(ours=False).items()},
}


def reference_of(name: str) -> str:
    """The model that this one is compared with."""
    return ALONE + REFERENCE if name.startswith(ALONE) else REFERENCE


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    source, lost = load(Path(p) for p in options.source)
    target, damaged = load([Path(options.to)])
    if not source or not target:
        print("no usable records; make some with benchmarks.collect")
        return 2
    curves: dict[str, list[list[float]]] = {name: [] for name in MODELS}
    best: list[float] = []
    for learned, asked in _parts(source, target, options.folds):
        weights = {
            reference: train(learned, options.steps, options.seed, prior=reference == REFERENCE)
            for reference in (REFERENCE, ALONE + REFERENCE)
        }
        for name, make in MODELS.items():
            for seed in range(options.seeds):
                found = replay(
                    asked, make(seed, weights[reference_of(name)]), seed, turns(options.trials)
                )
                curves[name] += [own[: options.trials] for own in found]
        best += [p.best_s for _ in range(options.seeds) for p in asked]
        print(f"{len(asked)} tasks replayed", flush=True)
    rows = summary(curves, best)
    headers = ["model", "trials needed", "never", "as fast", "of the paper's", "best at the end"]
    print(tables.markdown(headers, [[name, *_cells(row)] for name, row in rows.items()]))
    counts = {"source": len(source), "target": len(target), "damaged": lost + damaged}
    settings = {"folds": options.folds, "trials": options.trials, "seeds": options.seeds}
    write_json(options.data, {"tasks": counts, "settings": settings, "models": rows})
    return 0


def turns(trials: int) -> int:
    """How many turns of a search hold so many trials."""
    return 1 + max(0, math.ceil((trials - FIRST) / BATCH))


def summary(
    curves: Mapping[str, Sequence[Sequence[float]]], best: Sequence[float]
) -> dict[str, dict[str, float]]:
    """For each model, over tasks and seeds (in the same order everywhere).

    ``trials``: geometric mean of the trials needed over those that the reference needed, where both
    end; a search that never gets there counts as if it had with its last trial, and in ``never``.
    ``tied``: the same ratio, for both to be within a tie of the goal; ``paper``: likewise, to a tie
    with the network alone from nothing. ``best``: geometric mean of the pool's best over the best
    found.
    """
    rows = {}
    for name, own in curves.items():
        pairs = list(zip(own, curves[reference_of(name)], strict=True))
        trials, never = _compared(pairs, 1.0)
        tied, _ = _compared(pairs, TIE)
        paper, _ = _compared(zip(own, curves.get(ALONE + REFERENCE, ()), strict=False), TIE)
        at_end = [b / curve[-1] for b, curve in zip(best, own, strict=True) if curve[-1] < math.inf]
        found = {"trials": trials, "never": never, "tied": tied, "paper": paper}
        rows[name] = {**found, "best": _geometric(at_end)}
    return rows


def _compared(
    pairs: Iterable[tuple[Sequence[float], Sequence[float]]], slack: float
) -> tuple[float, int]:
    """Trials of the first over those of the second until ``slack`` times the second's best.

    And how often the first never got there.
    """
    ratios, never = [], 0
    for curve, reference in pairs:
        goal = reference[-1] * slack
        if math.isfinite(goal):
            needed = reached(curve, goal)
            never += needed is None
            ratios.append((needed or len(curve)) / (reached(reference, goal) or len(reference)))
    return _geometric(ratios), never


def reached(curve: Sequence[float], goal_s: float) -> int | None:
    """The trial that first was as fast as ``goal_s``; None if none was."""
    return next((n for n, seconds in enumerate(curve, 1) if seconds <= goal_s), None)


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def _cells(row: Mapping[str, float]) -> list[str]:
    ratios = [f"{row[k]:.2f}" for k in ("trials", "tied", "paper")]
    return [ratios[0], str(int(row["never"])), *ratios[1:], f"{row['best']:.3f}"]


def _parts(
    source: Sequence[Pool], target: Sequence[Pool], folds: int
) -> Iterator[tuple[list[Pool], list[Pool]]]:
    """(what weights may learn from, the tasks they are asked about), fold by fold."""
    if folds < 2:
        yield list(source), list(target)
        return
    for fold in range(folds):
        learned, asked = (
            [p for p in pools if records.in_fold(p.task.workload, folds, fold) is held]
            for pools, held in ((source, False), (target, True))
        )
        if learned and asked:
            yield learned, asked


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("source", nargs="+", help="records of the platform the weights come from")
    parser.add_argument("--to", required=True, help="records of the platform that is tuned")
    parser.add_argument("--trials", type=int, default=60, help="of a task")
    parser.add_argument("--folds", type=int, default=3, help="1: the weights may know the tasks")
    parser.add_argument("--steps", type=int, default=1000, help="of training the weights")
    parser.add_argument("--seeds", type=int, default=3, help="of each search")
    parser.add_argument("--seed", type=int, default=0, help="of training the weights")
    parser.add_argument("--data", help="write the figures there, as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
