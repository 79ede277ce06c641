"""What a strategy has not proposed yet of a task's sketches: the book that no point is in twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.search.space import Rows, SketchSpace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import Candidate

DRAWS = 50  # rounds of drawing without a new point after which a space counts as exhausted
DRAWN = 64  # points of a round


class Unproposed:
    """The spaces of a task's sketches, and which of their points are left.

    ``known`` are candidates of earlier searches; those that are no points of the sketches do not
    matter.
    """

    def __init__(self, sketches: Sequence[Sketch], known: Iterable[Candidate] = ()) -> None:
        self.spaces = [SketchSpace(s) for s in sketches]
        self._listed = [space.enumerate() for space in self.spaces]
        known = list(known)
        self._seen = [s.keys(s.rows_of_candidates(known)) for s in self.spaces]

    def fresh(self, i: int, rows: Rows) -> Rows:
        """Those of ``rows`` that are valid points of sketch ``i`` and left, each once, in order."""
        rows = self.spaces[i].unique(rows)
        return rows[~np.isin(self.spaces[i].keys(rows), self._seen[i])]

    def take(self, i: int, rows: Rows) -> list[Candidate]:
        """The candidates of rows that are left, which they are not from now on."""
        self._seen[i] = np.union1d(self._seen[i], self.spaces[i].keys(rows))
        return self.spaces[i].candidates(rows)

    def random(self, n: int, rng: np.random.Generator) -> list[Rows]:
        """For each sketch some points that are left: ``n`` in all, or what there is.

        Every sketch that has some left is as likely as any other.
        """
        left = [self._some(i, n, rng) for i in range(len(self.spaces))]
        counts = np.zeros(len(left), dtype=np.int64)
        sizes = np.array([len(rows) for rows in left], dtype=np.int64)
        for _ in range(min(n, int(sizes.sum()))):
            counts[rng.choice(np.flatnonzero(counts < sizes))] += 1
        return [rows[:count] for rows, count in zip(left, counts, strict=True)]

    def _some(self, i: int, n: int, rng: np.random.Generator) -> Rows:
        """At most ``n`` random points of sketch ``i`` that are left."""
        listed, space = self._listed[i], self.spaces[i]
        if listed is not None:
            left = listed[~np.isin(space.keys(listed), self._seen[i])]
            return rng.permutation(left)[:n]
        found, misses = space.rows_of([]), 0
        while len(found) < n and misses < DRAWS:
            more = self.fresh(i, np.concatenate([found, space.random(DRAWN, rng)]))
            misses = 0 if len(more) > len(found) else misses + 1
            found = more
        return found[:n]
