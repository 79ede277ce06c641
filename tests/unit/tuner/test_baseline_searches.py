"""Searches of other papers against the contract, and what each of them does by itself."""

from __future__ import annotations

import numpy as np
import pytest

from tests import fakes
from tests.contracts.search_strategy import SearchStrategyContract
from tests.unit.tuner.test_search import BIG, IMPORT, tune
from torch_pruner.config import OPTIONS
from torch_pruner.exc import OptionError
from torch_pruner.families import sketches_for
from torch_pruner.task import MeasureResult, MeasureStatus
from torch_pruner.tuner import BASELINES, STRATEGIES, make_cost_model, make_strategy
from torch_pruner.tuner.cost_model.analytic import AnalyticModel
from torch_pruner.tuner.cost_model.forest import ForestModel
from torch_pruner.tuner.cost_model.residual import ResidualModel
from torch_pruner.tuner.cost_model.tlp import TLPModel
from torch_pruner.tuner.search.adatune import FIRST_SHARE, AdatuneSearch, accepted
from torch_pruner.tuner.search.ansor import AnsorSearch, proportions
from torch_pruner.tuner.search.felix import PENALTY, FelixSearch, slopes
from torch_pruner.tuner.search.random_search import RandomSearch
from torch_pruner.tuner.search.share import Share
from torch_pruner.tuner.search.unproposed import Unproposed

HERE = f"{IMPORT}('tests.unit.tuner.test_baseline_searches')"


def ansor() -> AnsorSearch:
    return AnsorSearch(ForestModel(), population=64)


def ansor_tlp() -> AnsorSearch:
    return AnsorSearch(TLPModel(), population=64, generations=2)


def ansor_trees() -> AnsorSearch:
    return AnsorSearch(make_cost_model("trees"), population=64)


def felix() -> FelixSearch:
    return FelixSearch(ResidualModel())


def adatune() -> AdatuneSearch:
    return AdatuneSearch(ForestModel(), chains=16, steps=10)


class TestAnsor(SearchStrategyContract):
    make = f"{HERE}.ansor()"

    @pytest.fixture
    def strategy(self):
        return ansor()


class TestAnsorWithTLP(SearchStrategyContract):
    make = f"{HERE}.ansor_tlp()"

    @pytest.fixture
    def strategy(self):
        return ansor_tlp()


class TestAnsorWithTrees(SearchStrategyContract):
    make = f"{HERE}.ansor_trees()"

    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("xgboost")

    @pytest.fixture
    def strategy(self):
        return ansor_trees()


class TestFelix(SearchStrategyContract):
    make = f"{HERE}.felix()"

    @pytest.fixture
    def strategy(self):
        return felix()


class TestAdatune(SearchStrategyContract):
    make = f"{HERE}.adatune()"

    @pytest.fixture
    def strategy(self):
        return adatune()


@pytest.mark.parametrize("make", [ansor, felix, adatune])
@pytest.mark.parametrize(
    ("sizes", "optimum", "believed"),
    [((8, 8, 6, 6), (5, 2, 3, 2), (3, 4, 3, 1)), (BIG, (4, 5, 3, 4, 2, 1), (6, 4, 4, 3, 3, 1))],
    ids=["listed", "large"],
)
def test_each_beats_chance(make, sizes, optimum, believed) -> None:
    sketch = fakes.FakeSketch("s", sizes, optimum, believed)
    best = sketch.best_s()
    found, chance = [], []
    for seed in range(3):
        found.append(fakes.regret(best, tune(make(), [sketch], 64, seed=seed)))
        chance.append(fakes.regret(best, tune(RandomSearch(), [sketch], 64, seed=seed)))
    assert np.mean(found) < 0.7 * np.mean(chance)


@pytest.mark.parametrize("make", [ansor, felix, adatune])
def test_a_sketch_without_decisions_has_one_point(make) -> None:
    sketch = fakes.FakeSketch("fixed", (), (), ())
    sketch.valid = lambda decisions: np.ones(len(decisions), dtype=bool)
    strategy = make()
    strategy.start(fakes.make_task(), [sketch], rng=np.random.default_rng(0))
    assert [c.sketch for c in strategy.propose(4)] == ["fixed"]
    assert strategy.propose(4) == []


@pytest.mark.parametrize("make", [ansor, felix, adatune])
def test_history_is_learned_from(make) -> None:
    sketch = fakes.FakeSketch("s", (8, 8, 6, 6), (5, 2, 3, 2), (1, 5, 3, 1))
    known = tune(RandomSearch(), [sketch], 80)
    strategy = make()
    strategy.start(fakes.make_task(), [sketch], rng=np.random.default_rng(1), history=known)
    results = [fakes.invented([sketch], c) for c in strategy.propose(8)]
    assert np.median([r.latency_s for r in results]) < np.median([r.latency_s for r in known])


@pytest.mark.parametrize("make", [ansor, felix, adatune])
def test_sketches_of_a_task_are_asked_about_valid_points_only(make) -> None:
    """Symbols of a point that no kernel can have may be anything, or raise."""
    task = fakes.make_task(256)
    sketches = sketches_for(task)
    for sketch in sketches:
        symbols = sketch.symbols

        def checked(decisions, own=sketch, symbols=symbols):
            assert own.valid(decisions).all()
            return symbols(decisions)

        sketch.symbols = checked
    strategy = make()
    strategy.start(task, sketches, rng=np.random.default_rng(0))
    for _ in range(3):
        batch = strategy.propose(8)
        assert len(set(batch)) == 8
        seconds = [1e-4 * (1 + int(c.digest[:4], 16) / 2**16) for c in batch]
        ok = MeasureStatus.OK
        pairs = zip(batch, seconds, strict=True)
        strategy.observe([MeasureResult(c, ok, (s,)) for c, s in pairs])


def test_a_baseline_is_no_option_and_has_a_model_of_its_own() -> None:
    for name, model in BASELINES.items():
        with pytest.raises(ValueError, match="one of"):
            OPTIONS["strategy"].parse(name)
        if model not in ("", "trees"):
            assert make_strategy(name, make_cost_model(model)).cost_model is not None
    for name in set(STRATEGIES) - set(BASELINES):
        OPTIONS["strategy"].parse(name)
    with pytest.raises(OptionError, match="forest"):
        make_strategy("adatune", AnalyticModel())


def test_what_is_left_of_several_sketches() -> None:
    sketches = [fakes.FakeSketch("a", (3, 3), (1, 1), (1, 1)), fakes.FakeSketch("b", BIG, (4,) * 6)]
    rng = np.random.default_rng(0)
    left = Unproposed(sketches)
    small, large = left.random(400, rng)
    listed = left.spaces[0].enumerate()
    assert len(small) == len(listed)  # all of it; the other sketch has the rest
    assert len(large) == 400 - len(small)
    taken = left.take(0, small[:4])
    assert len(set(taken)) == 4
    assert len(left.fresh(0, listed)) == len(listed) - 4
    again = Unproposed(sketches[:1], taken)
    assert len(again.random(100, rng)[0]) == len(listed) - 4
    half, other = Unproposed(sketches).random(6, rng)
    assert len(half) + len(other) == 6


def test_shares_add_up() -> None:
    share = Share()
    assert [share.of(0.25, 4) for _ in range(3)] == [1, 1, 1]
    assert sum(share.of(0.05, 8) for _ in range(20)) == 8
    assert share.of(1.0, 1) == 0
    assert share.of(1.0, 8) == 7


def test_children_in_proportion_to_throughput() -> None:
    np.testing.assert_allclose(proportions(np.array([0.1, 0.3, 0.6])), [0.1, 0.3, 0.6])
    np.testing.assert_allclose(proportions(np.array([-2.0, -1.0, 1.0])), [0.0, 0.25, 0.75])
    np.testing.assert_allclose(proportions(np.zeros(4)), np.full(4, 0.25))


def test_the_evolution_starts_with_the_best_measured_points_too() -> None:
    sketch = fakes.FakeSketch("s", BIG, (4,) * 6, (3,) * 6)
    strategy = AnsorSearch(ForestModel(), population=40, generations=1)
    known = tune(RandomSearch(), [sketch], 30)
    strategy.start(fakes.make_task(), [sketch], rng=np.random.default_rng(1), history=known)
    (first,) = strategy._first()
    best = sorted(known, key=lambda r: r.latency_s)[:8]
    (space,) = strategy.spaces
    seeds = space.rows_of_candidates(r.candidate for r in best)
    assert np.isin(space.keys(seeds), space.keys(first)).all()
    assert 32 < len(first) <= 40


def test_slopes_of_a_plane_are_exact_and_stay_inside() -> None:
    sizes, weights = np.array([5, 3, 1, 2]), np.array([2.0, -1.0, 7.0, 0.5])
    seen = []

    def plane(rows: np.ndarray) -> np.ndarray:
        seen.append(rows)
        return rows @ weights

    at = np.random.default_rng(0).random((20, 4)) * (sizes - 1)
    at[0], at[1] = 0, sizes - 1
    found = slopes(plane, at, sizes)
    np.testing.assert_allclose(found[:, [0, 1, 3]], np.tile([2.0, -1.0, 0.5], (20, 1)))
    assert not found[:, 2].any()  # a decision with one option goes nowhere
    assert ((seen[0] >= 0) & (seen[0] < sizes)).all()


def test_slopes_are_those_of_the_interpolation() -> None:
    """Along any decision, the interpolated cost of a curved function changes as the slope says."""
    sizes = np.array([4, 4, 4])

    def curved(rows: np.ndarray) -> np.ndarray:
        return np.asarray(((rows - 1.3) ** 2).sum(axis=1) + rows[:, 0] * rows[:, 1])

    def interpolated(at: np.ndarray) -> float:
        low, up = np.floor(at).astype(int), np.argsort(np.floor(at) - at, kind="stable")
        part, value, corner = at - np.floor(at), float(curved(low[None])[0]), low.copy()
        for j in up:
            before = float(curved(corner[None])[0])
            corner[j] += 1
            value += part[j] * (float(curved(corner[None])[0]) - before)
        return value

    at = np.array([0.2, 1.7, 2.4])
    (found,) = slopes(curved, at[None], sizes)
    for j in range(3):
        step = 1e-3 * np.eye(3)[j]
        slope = (interpolated(at + step) - interpolated(at - step)) / 2e-3
        assert found[j] == pytest.approx(slope)


def test_invalid_corners_push_away() -> None:
    sizes = np.array([4, 4])

    def cost(rows: np.ndarray) -> np.ndarray:
        return np.where(rows[:, 0] > 1, np.nan, rows[:, 1].astype(float))

    at = np.array([[1.5, 0.2], [2.5, 2.5]])
    found = slopes(cost, at, sizes)
    assert found[0, 0] >= PENALTY
    assert not found[1].any()  # nothing valid in sight


def test_descent_of_the_symbols_ends_at_their_best() -> None:
    """Without a fitted term the first batch holds the point that the draft model likes most."""
    sketch = fakes.FakeSketch("s", BIG, (4,) * 6, (6, 4, 4, 3, 3, 1))
    strategy = FelixSearch(AnalyticModel())
    strategy.start(fakes.make_task(), [sketch], rng=np.random.default_rng(0))
    first = strategy.propose(8)
    believed = dict(zip(sketch.names, 2 ** np.array([6, 4, 4, 3, 3, 1]), strict=True))
    assert dict(first[0].decisions) == believed


def test_the_share_of_chance_follows_what_the_trees_do_not_know() -> None:
    sketch, task = fakes.FakeSketch("s", (8, 8, 6, 6), (5, 2, 3, 2)), fakes.make_task()
    strategy = adatune()
    strategy.start(task, [sketch], rng=np.random.default_rng(0))
    assert strategy.eps_greedy == FIRST_SHARE
    failed = [MeasureResult(c, MeasureStatus.TIMEOUT) for c in strategy.propose(4)]
    strategy.observe(failed)
    assert strategy.eps_greedy == FIRST_SHARE
    shares = []
    for flat in (False, True):
        strategy = adatune()
        strategy.start(task, [sketch], rng=np.random.default_rng(0))
        for _ in range(6):
            batch = strategy.propose(8)
            found = [fakes.invented([sketch], c) for c in batch]
            if flat:
                found = [MeasureResult(r.candidate, r.status, (1e-3,)) for r in found]
            strategy.observe(found)
        shares.append(strategy.eps_greedy)
    assert 0.0 < shares[0] < 0.5
    assert shares[1] == 0.0  # all points are alike, and every tree says so


def test_annealing_takes_what_gains_and_at_last_nothing_else() -> None:
    rng = np.random.default_rng(0)
    gain = np.array([0.1, 0.0, -0.1] * 500)
    hot, cold = accepted(gain, 1e6, rng), accepted(gain, 1e-6, rng)
    assert hot.mean() > 0.99
    assert cold.tolist() == [True, True, False] * 500
