"""Ansor's search over our sketches: evolution by the learned model alone, nothing is drafted.

Ansor (OSDI 2020) as TVM had it: a population of random points and the best measured ones, some
generations of mutation in which points have children in proportion to their predicted throughput,
and a batch of the best that any generation met, 5 % of it at random. TVM's sketches and annotations
are another space (``metaschedule`` searches its successor); here they are our sketches' decisions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.search.ranked import RankedSearch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.tuner.cost_model.base import Array, CostModel
    from torch_pruner.tuner.search.space import Rows

MEASURED = 0.2  # of the first generation, at most: the best measured points
MUTATED = 0.85


class AnsorSearch(RankedSearch):
    """``cost_model`` is the fitness: Ansor's trees, or another model in their place.

    Ansor has 2048 in its ``population``; most of our spaces have less than twenty thousand valid
    points, of which five generations of that would leave little.
    """

    def __init__(
        self,
        cost_model: CostModel,
        *,
        population: int = 512,
        generations: int = 4,
        eps_greedy: float = 0.05,
    ) -> None:
        super().__init__(cost_model, eps_greedy)
        self.population, self.generations = population, generations

    def find(self) -> list[Rows]:
        """Every point that the evolution has met."""
        rows = self._first()
        met = [rows]
        for _ in range(self.generations):
            rows = self._children(rows)
            met.append(rows)
        return [np.concatenate(parts) for parts in zip(*met, strict=True)]

    def _first(self) -> list[Rows]:
        """The best measured points and random ones, every sketch as often."""
        best = self.winners(int(MEASURED * self.population))
        wanted = self.population - sum(map(len, best))
        share = -(-wanted // max(1, len(self.spaces)))
        return [
            space.unique(np.concatenate([own, self._random(i, share)]))
            for i, (space, own) in enumerate(zip(self.spaces, best, strict=True))
        ]

    def _random(self, i: int, n: int) -> Rows:
        """Valid points of one sketch: ``n``, or what as many draws again and again have given."""
        space = self.spaces[i]
        found = space.random(n, self._rng)
        for _ in range(4):
            if len(found) < n:
                found = space.unique(np.concatenate([found, space.random(n, self._rng)]))
        return found[:n]

    def _children(self, rows: Sequence[Rows]) -> list[Rows]:
        """The next generation: as many as the population, but each once and none invalid."""
        scores = np.concatenate([*self.scores(rows), np.zeros(0)])
        if not len(scores):
            return list(rows)
        owner = np.repeat(np.arange(len(rows)), [len(own) for own in rows])
        place = np.concatenate([np.arange(len(own)) for own in rows])
        chosen = self._rng.choice(len(scores), size=self.population, p=proportions(scores))
        found = []
        for i, own in enumerate(rows):
            parents = own[place[chosen[owner[chosen] == i]]]
            mutated = self._rng.random(len(parents)) < MUTATED
            changed = self.spaces[i].mutate(parents, self._rng)
            found.append(self.spaces[i].unique(np.where(mutated[:, None], changed, parents)))
        return found


def proportions(scores: Array) -> Array:
    """Probabilities in proportion to scores; scores below zero are all raised by the least.

    Throughputs are positive as they are; ranks are not, and TVM gives those below zero no children.
    """
    weights = scores - min(float(scores.min()), 0.0)
    total = float(weights.sum())
    return weights / total if total > 0 else np.full(len(scores), 1.0 / len(scores))
