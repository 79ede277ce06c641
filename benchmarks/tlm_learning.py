"""What the generator of schedules learns from, and how: random points first, then the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_pruner.tuner.generator.model import Generator, optimiser
from torch_pruner.tuner.generator.sentence import Prompt
from torch_pruner.tuner.search.space import SketchSpace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.pools import Pool
    from torch_pruner.tuner.search.space import Rows

NEAR = 0.03  # of the best: how much slower counts by a factor of e less
LIST = 32  # sentences of a step and task
TASKS = 4  # of a step


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


def train(known: Sequence[Known], random_steps: int, steps: int, seed: int) -> Generator:
    """A generator from nothing: on random points, then on the best."""
    rng = np.random.default_rng(seed)
    generator = Generator(seed=seed)
    taught(generator, known, random_points, random_steps, rng)
    taught(generator, known, best_points, steps, rng)
    return generator


def taught(
    generator: Generator,
    known: Sequence[Known],
    batch: Callable[[Known, np.random.Generator], tuple[Prompt, int, Rows, Any] | None],
    steps: int,
    rng: np.random.Generator,
) -> None:
    """So many steps on what ``batch`` draws of some tasks each, the rate falling to zero."""
    adam = optimiser()
    rate = adam.rate
    for step in range(steps):
        adam.rate = rate * (1 - step / steps)
        some = [known[i] for i in rng.permutation(len(known))[:TASKS]]
        given = [b for k in some if (b := batch(k, rng)) is not None]
        if given:
            generator.step(adam, given)


def random_points(known: Known, rng: np.random.Generator) -> tuple[Prompt, int, Rows, Any] | None:
    """Valid points of one sketch, none likelier than another."""
    i = int(rng.integers(len(known.spaces)))
    rows = known.spaces[i].random(4 * LIST, rng)[:LIST]
    return (known.prompt, i, rows, np.ones(len(rows))) if len(rows) else None


def best_points(known: Known, rng: np.random.Generator) -> tuple[Prompt, int, Rows, Any] | None:
    """Measured points, drawn by how near they are to the best; of one sketch, by its share."""
    weights = [np.exp(-(s / known.best_s - 1) / NEAR) for s in known.seconds]
    totals = np.array([w.sum() for w in weights])
    i = int(rng.choice(len(totals), p=totals / totals.sum()))
    at = rng.choice(len(weights[i]), LIST, p=weights[i] / totals[i])
    return known.prompt, i, known.rows[i][at], np.ones(LIST)
