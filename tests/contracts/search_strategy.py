"""What every search strategy promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import fakes
from torch_pruner.task import MeasureResult, MeasureStatus

if TYPE_CHECKING:
    from torch_pruner.tuner.search.base import SearchStrategy


class SearchStrategyContract:
    """Subclasses give a fixture ``strategy``, and ``make``: an expression (text) for the same."""

    make: str  # "DraftThenVerify(...)", with its imports: run in another process

    @pytest.fixture
    def strategy(self) -> SearchStrategy:
        raise NotImplementedError

    @pytest.fixture
    def sketches(self) -> list[fakes.FakeSketch]:
        return [fakes.FakeSketch(), fakes.FakeSketch("other", (3, 3), (1, 1), (0, 1), 4e-4)]

    def start(self, strategy, sketches, *, seed=0, history=()) -> None:
        rng = np.random.default_rng(seed)
        strategy.start(fakes.make_task(), sketches, rng=rng, history=history)

    def test_proposes_each_valid_point_once_and_then_nothing(self, strategy) -> None:
        sketches = [
            fakes.FakeSketch("a", (3, 4), (1, 1), (1, 2)),
            fakes.FakeSketch("b", (4,), (1,), (1,)),
        ]
        self.start(strategy, sketches)
        seen = []
        while batch := strategy.propose(5):
            assert len(batch) <= 5
            seen.extend(batch)
            strategy.observe([fakes.invented(sketches, c) for c in batch])
        expected = 0
        for sketch in sketches:
            grid = np.stack(np.meshgrid(*sketch.domains, indexing="ij"), -1).reshape(
                -1, len(sketch.names)
            )
            expected += int(sketch.valid(grid).sum())
        assert len(seen) == len(set(seen)) == expected
        assert strategy.propose(3) == []

    def test_does_not_repeat_what_history_holds(self, strategy, sketches) -> None:
        small = [sketches[1]]
        self.start(strategy, small)
        known = [fakes.invented(small, c) for c in strategy.propose(4)]
        self.start(strategy, small, history=known, seed=1)
        rest = strategy.propose(100)
        assert len(known) == 4
        assert not {r.candidate for r in known} & set(rest)
        assert rest

    def test_candidates_are_valid_points(self, strategy, sketches) -> None:
        self.start(strategy, sketches)
        for candidate in strategy.propose(32):
            sketch = next(s for s in sketches if s.name == candidate.sketch)
            assert sketch.valid(sketch.row(candidate)).all()
            assert candidate.decisions == tuple(sorted(candidate.decisions))

    def test_failures_are_observed_quietly(self, strategy, sketches) -> None:
        self.start(strategy, sketches)
        for status in (
            MeasureStatus.BUILD_ERROR,
            MeasureStatus.TIMEOUT,
            MeasureStatus.WRONG_RESULT,
        ):
            batch = strategy.propose(4)
            strategy.observe([MeasureResult(c, status, (), "bad") for c in batch])
        assert strategy.propose(4)

    def test_unobserved_proposals_do_no_harm(self, strategy, sketches) -> None:
        self.start(strategy, sketches)
        first = strategy.propose(8)
        strategy.observe([fakes.invented(sketches, first[0])])
        assert not set(strategy.propose(8)) & set(first)

    def test_same_seed_same_proposals(self, sketches) -> None:
        runs = []
        for seed in (3, 3, 4):
            strategy = eval(self.make)
            self.start(strategy, sketches, seed=seed)
            runs.append(_trace(strategy, sketches))
        assert runs[0] == runs[1]
        assert runs[0] != runs[2]

    def test_reproducible_in_another_process(self, strategy, sketches) -> None:
        self.start(strategy, sketches, seed=5)
        script = (
            "import json\n"
            f"strategy = (lambda: {self.make})()\n"
            "from tests.contracts.search_strategy import SearchStrategyContract, _trace\n"
            "from tests import fakes\n"
            "other = fakes.FakeSketch('other', (3, 3), (1, 1), (0, 1), 4e-4)\n"
            "sketches = [fakes.FakeSketch(), other]\n"
            "SearchStrategyContract().start(strategy, sketches, seed=5)\n"
            "print(json.dumps(_trace(strategy, sketches)))\n"
        )
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "77"}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == _trace(strategy, sketches)


def _trace(strategy, sketches) -> list[str]:
    digests = []
    for _ in range(4):
        batch = strategy.propose(6)
        digests += [c.digest for c in batch]
        strategy.observe([fakes.invented(sketches, c) for c in batch])
    return digests
