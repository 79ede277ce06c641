"""TLM's search: what a generator writes is measured as it comes, nothing is ranked.

TLM (OSDI 2024) draws from a language model that was trained before on the best schedules of other
tasks, and measures some ten of a subgraph. Training again on what was measured is no part of a
session: see ``benchmarks.tlm``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.generator.sentence import Prompt
from torch_pruner.tuner.search.base import SearchStrategy
from torch_pruner.tuner.search.unproposed import Unproposed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import Candidate, MeasureResult, Task
    from torch_pruner.tuner.generator.model import Generator

DRAWN = 64  # sentences of a round
ROUNDS = 4  # without a new point, after which chance fills the rest


class TLMSearch(SearchStrategy):
    """Proposes what ``generator`` writes, the likeliest of a round first."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def start(
        self,
        task: Task,
        sketches: Sequence[Sketch],
        *,
        rng: np.random.Generator,
        history: Sequence[MeasureResult] = (),
    ) -> None:
        self._rng, self._prompt = rng, Prompt.of(task, sketches)
        self._left = Unproposed(sketches, (r.candidate for r in history))

    def propose(self, n: int) -> list[Candidate]:
        proposals: list[Candidate] = []
        misses = 0
        while len(proposals) < n and misses < ROUNDS and self._left.spaces:
            new = self._round(n - len(proposals))
            misses = 0 if new else misses + 1
            proposals += new
        for i, rows in enumerate(self._left.random(n - len(proposals), self._rng)):
            proposals += self._left.take(i, rows)
        return proposals

    def observe(self, results: Sequence[MeasureResult]) -> None:
        pass  # see the module

    def _round(self, n: int) -> list[Candidate]:
        written = self.generator.write(self._prompt, DRAWN, self._rng)
        fresh = [self._left.fresh(i, rows) for i, rows in enumerate(written)]
        scores = [
            self.generator.log_probability(self._prompt, i, rows) for i, rows in enumerate(fresh)
        ]
        where = [(i, j) for i, rows in enumerate(fresh) for j in range(len(rows))]
        order = np.argsort(-np.concatenate([*scores, np.zeros(0)]), kind="stable")[:n]
        found: list[Candidate] = []
        for i, j in (where[k] for k in order):
            found += self._left.take(i, fresh[i][j : j + 1])
        return found
