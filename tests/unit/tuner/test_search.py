"""Strategies against their contract, and draft-then-verify against chance."""

from __future__ import annotations

import numpy as np
import pytest

from tests import fakes
from tests.contracts.search_strategy import SearchStrategyContract
from torch_pruner.task import Candidate
from torch_pruner.tuner.cost_model.analytic import AnalyticModel
from torch_pruner.tuner.cost_model.residual import ResidualModel
from torch_pruner.tuner.search.draft_verify import DraftThenVerify
from torch_pruner.tuner.search.random_search import RandomSearch
from torch_pruner.tuner.search.space import SketchSpace

IMPORT = "__import__('importlib').import_module"
BIG = (12, 12, 12, 12, 8, 8)  # 1.3 million points: the genetic search


class TestRandomSearch(SearchStrategyContract):
    make = f"{IMPORT}('torch_pruner.tuner.search.random_search').RandomSearch()"

    @pytest.fixture
    def strategy(self):
        return RandomSearch()


class TestDraftThenVerify(SearchStrategyContract):
    make = f"{IMPORT}('tests.unit.tuner.test_search').draft_verify(draft_size=24)"

    @pytest.fixture
    def strategy(self):
        return draft_verify(draft_size=24)


class TestDraftThenVerifyEvolving(TestDraftThenVerify):
    """The genetic path, forced on small spaces."""

    make = f"{IMPORT}('tests.unit.tuner.test_search').draft_verify(draft_size=24)"

    @pytest.fixture
    def sketches(self):
        return [fakes.FakeSketch("fake", BIG, (4,) * 6, (3,) * 6), fakes.FakeSketch("other")]

    def test_reproducible_in_another_process(self) -> None:
        pytest.skip("the sketches of the other process are small; the parent class covers it")


def draft_verify(**kwargs) -> DraftThenVerify:
    model = ResidualModel()
    return DraftThenVerify(model, model, **kwargs)


def tune(strategy, sketches, trials, *, seed=0, batch=8):
    strategy.start(fakes.make_task(), sketches, rng=np.random.default_rng(seed))
    results = []
    while len(results) < trials and (proposals := strategy.propose(batch)):
        found = [fakes.invented(sketches, c) for c in proposals]
        strategy.observe(found)
        results += found
    return results


@pytest.mark.parametrize(
    ("sizes", "optimum", "believed"),
    [((8, 8, 6, 6), (5, 2, 3, 2), (3, 4, 3, 1)), (BIG, (4, 5, 3, 4, 2, 1), (6, 4, 4, 3, 3, 1))],
    ids=["listed", "evolved"],
)
def test_beats_chance_and_the_draft_model_alone(sizes, optimum, believed) -> None:
    sketch = fakes.FakeSketch("s", sizes, optimum, believed)
    best = sketch.best_s()
    drafted, chance, unverified = [], [], []
    for seed in range(8):
        drafted.append(fakes.regret(best, tune(draft_verify(), [sketch], 40, seed=seed)))
        chance.append(fakes.regret(best, tune(RandomSearch(), [sketch], 40, seed=seed)))
        analytic = DraftThenVerify(AnalyticModel(), AnalyticModel())
        unverified.append(fakes.regret(best, tune(analytic, [sketch], 40, seed=seed)))
    assert np.median(drafted) < 0.3
    assert np.mean(drafted) < 0.5 * np.mean(chance)
    assert np.mean(drafted) <= np.mean(unverified)


def test_the_first_proposal_is_the_best_draft() -> None:
    sketches = [fakes.FakeSketch("slow", scale_s=1.0), fakes.FakeSketch("fast")]
    strategy = draft_verify()
    strategy.start(fakes.make_task(), sketches, rng=np.random.default_rng(0))
    (first,) = strategy.propose(1)
    assert first.sketch == "fast"
    assert dict(first.decisions) == {"t0": 8, "t1": 4, "t2": 8, "t3": 2}


def test_chance_gets_its_share() -> None:
    sketch = fakes.FakeSketch()
    strategy = draft_verify(eps_greedy=0.25)
    strategy.start(fakes.make_task(), [sketch], rng=np.random.default_rng(0))
    assert [strategy._gambles(4) for _ in range(3)] == [1, 1, 1]
    strategy.eps_greedy = 0.1
    assert sum(strategy._gambles(4) for _ in range(10)) == 4


def test_history_steers_the_first_proposals() -> None:
    sketch = fakes.FakeSketch("s", (8, 8, 6, 6), (5, 2, 3, 2), (1, 5, 3, 1))
    known = tune(draft_verify(), [sketch], 40)
    strategy = draft_verify()
    strategy.start(fakes.make_task(), [sketch], rng=np.random.default_rng(1), history=known)
    results = [fakes.invented([sketch], c) for c in strategy.propose(4)]
    assert np.median([r.latency_s for r in results]) < np.median([r.latency_s for r in known])


def test_space_keys_are_exact_and_rows_round_trip() -> None:
    space = SketchSpace(fakes.FakeSketch())
    rows = space.enumerate()
    assert len(np.unique(space.keys(rows))) == len(rows)
    np.testing.assert_array_equal(space.rows_of_candidates(space.candidates(rows)), rows)
    assert space.rows_of([(3, 1, 1, 1)]).shape == (0, 4)  # 3 is no option


def test_a_space_too_large_for_exact_keys_is_hashed() -> None:
    space = SketchSpace(fakes.FakeSketch("huge", (40,) * 12, (0,) * 12, (0,) * 12))
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 40, (5000, 12))
    assert len(np.unique(space.keys(rows))) == 5000


def test_a_sketch_without_decisions_has_one_point() -> None:
    sketch = fakes.FakeSketch("fixed", (), (), ())
    sketch.valid = lambda decisions: np.ones(len(decisions), dtype=bool)
    strategy = draft_verify()
    strategy.start(fakes.make_task(), [sketch], rng=np.random.default_rng(0))
    assert [c.sketch for c in strategy.propose(4)] == ["fixed"]
    assert strategy.propose(4) == []


def test_points_near_those_of_another_sketch() -> None:
    other = fakes.FakeSketch("fake", (8, 8, 6, 6))
    space = SketchSpace(fakes.FakeSketch())
    names = other.names
    inside = Candidate("fake", tuple(zip(names, (4, 2, 8, 4), strict=True)))
    beyond = Candidate("fake", tuple(zip(names, (128, 2, 4, 1), strict=True)))
    rows = space.near([inside, beyond])
    decisions = space.decisions(rows).tolist()
    assert decisions == [[4, 2, 8, 4], [32, 2, 4, 1]]
    refused = Candidate("fake", tuple(zip(names, (32, 32, 32, 8), strict=True)))
    around = space.near([refused])
    assert len(around)
    assert len(space.valid(around)) == len(around)
    assert len(space.near([Candidate("another", inside.decisions)])) == 0
    assert len(space.near([])) == 0


def test_what_was_best_elsewhere_is_drafted() -> None:
    """The optimum, which the draft model does not rank among its few drafts."""
    sketch, task = fakes.FakeSketch(believed=(1, 4, 0, 0)), fakes.make_task()
    best = Candidate(sketch.name, tuple(zip(sketch.names, (16, 2, 8, 4), strict=True)))

    def first_batches(others):
        model = ResidualModel()
        strategy = DraftThenVerify(model, model, draft_size=16, eps_greedy=0.0)
        strategy.start(task, [sketch], rng=np.random.default_rng(0))
        strategy.propose(1)
        strategy.learn_from(others)
        strategy.draft()
        return strategy._drafts[0].tolist(), strategy._spaces[0]

    without, _ = first_batches([])
    drafts, space = first_batches([best])
    (row,) = space.rows_of_candidates([best]).tolist()
    assert row not in without
    assert row in drafts
