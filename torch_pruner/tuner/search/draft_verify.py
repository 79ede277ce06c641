"""Draft-then-verify: a cheap model picks drafts, a better one ranks them, the top are measured.

Drafting scores integers by arithmetic: a small space is listed whole, a large one searched by a
genetic algorithm that starts from the measured winners and the sketch's default. Neighbours of the
best measured points are drafted whatever their score, so that the search closes in on what is
really fast and not on what the draft model believes; and so are the best of similar tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_pruner.task import Candidate, MeasureResult, MeasureStatus, Task
from torch_pruner.tuner.search.base import SearchStrategy
from torch_pruner.tuner.search.share import Share
from torch_pruner.tuner.search.space import Rows, SketchSpace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.tuner.cost_model.base import CostModel

Scores = np.ndarray[Any, np.dtype[np.float64]]

LISTED = 20_000  # valid points of a sketch that are scored without a genetic search
WINNERS = 8  # best measured points that seed the next draft
NEIGHBOURS_OF = 3  # of them, those whose neighbours are drafted
MUTATED, CROSSED = 0.85, 0.25


class DraftThenVerify(SearchStrategy):
    """``draft_model`` picks ``draft_size`` points, and ``cost_model`` ranks them.

    Drafts are kept for ``refresh_every`` proposals.

    A share ``eps_greedy`` of what is proposed are drafts drawn at random. Both models learn from
    what is observed; they may be one and the same.
    """

    def __init__(
        self,
        draft_model: CostModel,
        cost_model: CostModel,
        *,
        draft_size: int = 512,
        eps_greedy: float = 0.1,
        refresh_every: int = 2,
        population: int = 1024,
        generations: int = 4,
    ) -> None:
        self.draft_model, self.cost_model = draft_model, cost_model
        self.draft_size, self.eps_greedy, self.refresh_every = draft_size, eps_greedy, refresh_every
        self.population, self.generations = population, generations

    def start(
        self,
        task: Task,
        sketches: Sequence[Sketch],
        *,
        rng: np.random.Generator,
        history: Sequence[MeasureResult] = (),
    ) -> None:
        self._task, self._rng = task, rng
        self._spaces = [SketchSpace(s) for s in sketches]
        self._listed = [_listed(space) for space in self._spaces]
        self._seen = [np.zeros(0, dtype=np.uint64) for _ in sketches]
        self._drafts: list[Rows] = [space.rows_of([]) for space in self._spaces]
        self._borrowed: list[Rows] = [space.rows_of([]) for space in self._spaces]
        self._results: list[MeasureResult] = []
        self._age = self.refresh_every
        self._chance = Share()
        for i, space in enumerate(self._spaces):
            self._mark(i, space.rows_of_candidates(r.candidate for r in history))
        if history:
            self.observe(history)

    def draft(self) -> None:
        if self._age < self.refresh_every:
            return
        self._age = 0
        found = [self._draft_one(i) for i in range(len(self._spaces))]
        kept = _best_of([scores for _, scores in found], self.draft_size)
        for i, (rows, _) in enumerate(found):
            near = self._fresh(i, self._neighbourhood(i))
            other = self._fresh(i, self._borrowed[i])
            chance = self._fresh(i, self._spaces[i].random(16, self._rng))
            drafts = np.concatenate([rows[kept[i]], near, other, chance])
            self._drafts[i] = self._spaces[i].unique(drafts)

    def propose(self, n: int) -> list[Candidate]:
        if sum(len(d) for d in self._drafts) < n:
            self._age = self.refresh_every  # used up before their time
        self.draft()
        self._age += 1
        scores = [
            self.cost_model.predict(self._task, space.sketch, space.decisions(rows))
            for space, rows in zip(self._spaces, self._drafts, strict=True)
        ]
        where = [(i, j) for i, rows in enumerate(self._drafts) for j in range(len(rows))]
        order = np.argsort(-np.concatenate([*scores, np.zeros(0)]), kind="stable")
        chosen = [where[k] for k in order[: n - self._gambles(n)]]
        rest = order[len(chosen) :]
        extra = min(n - len(chosen), len(rest))
        chosen += [where[int(k)] for k in self._rng.choice(rest, size=extra, replace=False)]
        proposals: list[Candidate] = []
        for i, j in chosen:
            proposals += self._spaces[i].candidates(self._drafts[i][j : j + 1])
        for i, rows in enumerate(self._drafts):
            taken = np.zeros(len(rows), dtype=bool)
            taken[[j for k, j in chosen if k == i]] = True
            self._mark(i, rows[taken])
            self._drafts[i] = rows[~taken]
        return proposals

    def observe(self, results: Sequence[MeasureResult]) -> None:
        self._results.extend(results)
        sketches = [s.sketch for s in self._spaces]
        self.cost_model.update(self._task, sketches, results)
        if self.draft_model is not self.cost_model:
            self.draft_model.update(self._task, sketches, results)

    def learn_from(self, others: Sequence[Candidate]) -> None:
        first = not any(map(len, self._borrowed))
        self._borrowed = [space.near(others) for space in self._spaces]
        if first and any(map(len, self._borrowed)):
            self._age = self.refresh_every  # the drafts of before were made without any

    def _gambles(self, n: int) -> int:
        """How many of ``n`` proposals are left to chance."""
        return self._chance.of(self.eps_greedy, n)

    def _mark(self, i: int, rows: Rows) -> None:
        self._seen[i] = np.union1d(self._seen[i], self._spaces[i].keys(rows))

    def _fresh(self, i: int, rows: Rows) -> Rows:
        return rows[~np.isin(self._spaces[i].keys(rows), self._seen[i])]

    def _winners(self, i: int, n: int) -> Rows:
        """The best measured points, as far as they belong to sketch ``i``."""
        good = [r for r in self._results if r.status is MeasureStatus.OK]
        good = sorted(good, key=lambda r: r.latency_s)[:n]
        return self._spaces[i].rows_of_candidates(r.candidate for r in good)

    def _neighbourhood(self, i: int) -> Rows:
        return self._spaces[i].neighbours(self._winners(i, NEIGHBOURS_OF))

    def _score(self, i: int, rows: Rows) -> Scores:
        space = self._spaces[i]
        return self.draft_model.predict(self._task, space.sketch, space.decisions(rows))

    def _draft_one(self, i: int) -> tuple[Rows, Scores]:
        """Unseen points of one sketch with their draft scores."""
        listed = self._listed[i]
        rows = self._evolve(i) if listed is None else listed
        rows = self._fresh(i, rows)
        return rows, self._score(i, rows)

    def _evolve(self, i: int) -> Rows:
        """Every point that a genetic search on the draft score has met."""
        space, rng = self._spaces[i], self._rng
        seeds = [space.valid(space.default()), self._winners(i, WINNERS), self._drafts[i]]
        rows = space.unique(np.concatenate([*seeds, space.random(self.population, rng)]))
        scores = self._score(i, rows)
        pool, pool_scores, pool_keys = rows, scores, space.keys(rows)
        for _ in range(self.generations):
            if not len(rows):
                break
            parents = _tournament(scores, self.population, rng)
            children = rows[parents]
            mates = rows[_tournament(scores, self.population, rng)]
            crossed = rng.random(self.population) < CROSSED
            children = np.where(crossed[:, None], space.cross(children, mates, rng), children)
            mutated = rng.random(self.population) < MUTATED
            children = np.where(mutated[:, None], space.mutate(children, rng), children)
            children = space.unique(children)
            new = children[~np.isin(space.keys(children), pool_keys)]
            new_scores = self._score(i, new)
            pool = np.concatenate([pool, new])
            pool_keys = np.concatenate([pool_keys, space.keys(new)])
            pool_scores = np.concatenate([pool_scores, new_scores])
            top = np.argsort(-pool_scores, kind="stable")[: self.population]
            rows, scores = pool[top], pool_scores[top]
        return pool


def _listed(space: SketchSpace) -> Rows | None:
    rows = space.enumerate()
    return None if rows is None or len(rows) > LISTED else rows


def _tournament(scores: Scores, n: int, rng: np.random.Generator) -> Rows:
    """Indices of ``n`` winners of duels: only the order of scores matters, not their scale."""
    a, b = rng.integers(0, len(scores), size=(2, n))
    winners: Rows = np.where(scores[a] >= scores[b], a, b)
    return winners


def _best_of(scores: Sequence[Scores], n: int) -> list[Rows]:
    """For each sketch, the indices of its points that are among the ``n`` best of all."""
    joined = np.concatenate([*scores, np.zeros(0)])
    owner = np.repeat(np.arange(len(scores)), [len(s) for s in scores])
    start = np.cumsum([0, *(len(s) for s in scores)])
    top = np.argsort(-joined, kind="stable")[:n]
    return [top[owner[top] == i] - start[i] for i in range(len(scores))]
