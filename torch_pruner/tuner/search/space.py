"""The points of one sketch as rows of option indices, and the moves that search makes between them.

Everything is vectorised; a point has a 64-bit key, so that sets of points are sorted arrays.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_pruner.families.space import Sketch

Rows = np.ndarray[Any, np.dtype[np.int64]]
Keys = np.ndarray[Any, np.dtype[np.uint64]]

ENUMERABLE = 1 << 16  # raw points that may be filtered one by one


class SketchSpace:
    """Rows (n, d) hold, per decision, the index of the option taken."""

    def __init__(self, sketch: Sketch) -> None:
        self.sketch = sketch
        self.options = [np.asarray(domain, dtype=np.int64) for domain in sketch.domains]
        self.sizes = np.array([len(o) for o in self.options], dtype=np.int64)
        self.raw_size = math.prod(len(o) for o in self.options)
        if self.raw_size < 1 << 63:
            strides = np.concatenate([[1], np.cumprod(self.sizes[:-1].astype(object))])
            self._strides = strides[: len(self.sizes)].astype(np.uint64)
        else:  # too many for exact keys: hash, with odd factors from a fixed stream
            factors = np.random.default_rng(1).integers(
                0, 1 << 63, len(self.sizes), dtype=np.uint64
            )
            self._strides = factors * np.uint64(2) + np.uint64(1)

    def decisions(self, rows: Rows) -> np.ndarray[Any, Any]:
        """The options behind ``rows``: (n, d) integers."""
        columns = [o[rows[:, j]] for j, o in enumerate(self.options)]
        return np.stack(columns, axis=1) if columns else np.zeros((len(rows), 0), dtype=np.int64)

    def keys(self, rows: Rows) -> Keys:
        keys: Keys = (rows.astype(np.uint64) * self._strides).sum(axis=1, dtype=np.uint64)
        return keys

    def valid(self, rows: Rows) -> Rows:
        """The rows that the sketch accepts."""
        accepted: Rows = rows[np.asarray(self.sketch.valid(self.decisions(rows)), dtype=bool)]
        return accepted

    def unique(self, rows: Rows) -> Rows:
        """Valid rows, each once, in order of first appearance."""
        _, first = np.unique(self.keys(rows), return_index=True)
        return self.valid(rows[np.sort(first)])

    def enumerate(self) -> Rows | None:
        """Every valid row, or None where there are too many to list."""
        if self.raw_size > ENUMERABLE:
            return None
        shape = tuple(int(s) for s in self.sizes)
        grid = np.indices(shape).reshape(len(self.sizes), self.raw_size)
        return self.valid(np.ascontiguousarray(grid.T).astype(np.int64))

    def default(self) -> Rows:
        """The sketch's own choice as one row (none when it is not among the options)."""
        return self.rows_of([np.asarray(self.sketch.default()).tolist()])

    def random(self, n: int, rng: np.random.Generator) -> Rows:
        """About ``n`` random valid rows, possibly fewer."""
        return self.unique(rng.integers(0, self.sizes, size=(n, len(self.sizes))))

    def mutate(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Each row with one decision drawn anew: half the time a step to the next option."""
        if not len(self.sizes) or not len(rows):
            return rows
        n = np.arange(len(rows))
        which = rng.integers(0, len(self.sizes), size=len(rows))
        size = self.sizes[which]
        step = np.where(rng.random(len(rows)) < 0.5, 1, -1)
        near = np.clip(rows[n, which] + step, 0, size - 1)
        far = rng.integers(0, size)
        changed = rows.copy()
        changed[n, which] = np.where(rng.random(len(rows)) < 0.5, near, far)
        return changed

    def cross(self, left: Rows, right: Rows, rng: np.random.Generator) -> Rows:
        """Rows that take each decision from one of two parents."""
        return np.where(rng.random(left.shape) < 0.5, left, right)

    def neighbours(self, rows: Rows) -> Rows:
        """All rows that differ from one of ``rows`` in one decision."""
        found = []
        for j, size in enumerate(self.sizes):
            block = np.repeat(rows, size, axis=0)
            block[:, j] = np.tile(np.arange(size), len(rows))
            found.append(block)
        return self.unique(np.concatenate(found)) if found else rows

    def rows_of(self, decisions: Iterable[Iterable[int]]) -> Rows:
        """The rows behind tuples of options; a tuple with an unknown option is left out."""
        rows = []
        for values in decisions:
            found = [np.flatnonzero(o == v) for o, v in zip(self.options, values, strict=True)]
            if all(len(f) for f in found):
                rows.append([int(f[0]) for f in found])
        return np.array(rows, dtype=np.int64).reshape(len(rows), len(self.sizes))

    def rows_of_candidates(self, candidates: Iterable[Candidate]) -> Rows:
        """The rows of those candidates that are points of this sketch."""
        names = self.sketch.names
        taken = [dict(c.decisions) for c in candidates if c.sketch == self.sketch.name]
        return self.rows_of([t[n] for n in names] for t in taken if set(t) == set(names))

    def near(self, candidates: Iterable[Candidate]) -> Rows:
        """Points like those of another task's sketch of this name: of every decision the nearest
        option, and where the sketch refuses that, what differs from it in one decision.
        """
        names = self.sketch.names
        taken = [dict(c.decisions) for c in candidates if c.sketch == self.sketch.name]
        values = [[t[n] for n in names] for t in taken if set(t) == set(names)]
        if not values or not names:
            return self.rows_of([])
        columns = [
            np.abs(o[None, :] - np.array([v[j] for v in values])[:, None]).argmin(axis=1)
            for j, o in enumerate(self.options)
        ]
        rows = np.stack(columns, axis=1).astype(np.int64)
        accepted = np.asarray(self.sketch.valid(self.decisions(rows)), dtype=bool)
        return self.unique(np.concatenate([rows[accepted], self.neighbours(rows[~accepted])]))

    def candidates(self, rows: Rows) -> list[Candidate]:
        names = self.sketch.names
        order = np.argsort(names) if names else np.zeros(0, dtype=np.int64)
        return [
            Candidate(self.sketch.name, tuple((names[j], int(values[j])) for j in order))
            for values in self.decisions(rows)
        ]
