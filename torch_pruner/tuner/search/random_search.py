"""Uniform random search: the control group, and the simplest example of a strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.search.base import SearchStrategy
from torch_pruner.tuner.search.space import Rows, SketchSpace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import Candidate, MeasureResult, Task

DRAWS = 50  # rounds of drawing without a new point after which a space counts as exhausted


class RandomSearch(SearchStrategy):
    """Draws valid points without repetition, every sketch equally often."""

    def start(
        self,
        task: Task,
        sketches: Sequence[Sketch],
        *,
        rng: np.random.Generator,
        history: Sequence[MeasureResult] = (),
    ) -> None:
        self._rng = rng
        self._spaces = [SketchSpace(s) for s in sketches]
        self._seen = []
        self._left: list[Rows | None] = []
        for space in self._spaces:
            known = space.keys(space.rows_of_candidates(r.candidate for r in history))
            self._seen.append({int(k) for k in known})
            rows = space.enumerate()
            if rows is not None:
                rows = rng.permutation(rows[~np.isin(space.keys(rows), known)])
            self._left.append(rows)

    def propose(self, n: int) -> list[Candidate]:
        chosen: list[Candidate] = []
        open_ = list(range(len(self._spaces)))
        while len(chosen) < n and open_:
            i = int(self._rng.choice(open_))
            row = self._draw(i)
            if row is None:
                open_.remove(i)
            else:
                chosen.extend(self._spaces[i].candidates(row))
        return chosen

    def observe(self, results: Sequence[MeasureResult]) -> None:
        pass  # chance learns nothing

    def _draw(self, i: int) -> Rows | None:
        space, left = self._spaces[i], self._left[i]
        if left is not None:
            self._left[i] = left[1:]
            return left[:1] if len(left) else None
        for _ in range(DRAWS):
            for row in space.random(16, self._rng):
                key = int(space.keys(row[None])[0])
                if key not in self._seen[i]:
                    self._seen[i].add(key)
                    return np.asarray(row[None])
        return None
