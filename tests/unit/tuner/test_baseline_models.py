"""Cost models of other papers against the contract, and what each of them does by itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests import fakes
from tests.contracts.cost_model import CostModelContract, results_of
from torch_pruner.families import sketches_for
from torch_pruner.task import MeasureResult, MeasureStatus
from torch_pruner.tuner import make_cost_model
from torch_pruner.tuner.cost_model import pattern, tlp
from torch_pruner.tuner.cost_model.forest import ForestModel, expected_improvement, grow
from torch_pruner.tuner.cost_model.layers import ROWS, size_of, views
from torch_pruner.tuner.cost_model.measured import MAX_KEPT, Measured, lists_of
from torch_pruner.tuner.cost_model.tlp import TLPModel


class TestTLPModel(CostModelContract):
    @pytest.fixture
    def model(self):
        return TLPModel(1)


class TestForestModel(CostModelContract):
    @pytest.fixture
    def model(self):
        return ForestModel(1)


class TestStatementTrees(CostModelContract):
    @pytest.fixture
    def model(self):
        pytest.importorskip("xgboost")
        return make_cost_model("trees", 1)


def points_of(sketch, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    points = np.unique(np.stack([rng.choice(d, 4 * n) for d in sketch.domains], 1), axis=0)
    return points[rng.permutation(len(points))[:n]]


@pytest.mark.parametrize(
    ("name", "batches", "least"), [("tlp", 40, 0.5), ("forest", 10, 0.6), ("trees", 10, 0.6)]
)
def test_learning_gives_a_ranking(name, batches, least) -> None:
    if name == "trees":
        pytest.importorskip("xgboost")
    sketch, task = fakes.FakeSketch(believed=(1, 4, 0, 0)), fakes.make_task()
    points = points_of(sketch, 400)
    model = make_cost_model(name)
    for at in range(0, 8 * batches, 8):
        model.update(task, [sketch], results_of(sketch, points[at : at + 8]))
    rest = points[8 * batches :]
    score, latency = model.predict(task, sketch, rest), sketch.latency_s(rest)
    order, right = score.argsort().argsort(), (-latency).argsort().argsort()
    assert len(rest) > 50
    assert np.corrcoef(order, right)[0, 1] > least


def test_gradients_of_sequences_equal_those_of_differences() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((ROWS, 4, tlp.TOKEN))
    tokens[:, :, 0] = np.arange(4) < rng.integers(1, 5, ROWS)[:, None]
    flat = tlp.initial(rng, "float64")
    flat += 0.1 * rng.standard_normal(flat.shape)
    pull, found = rng.standard_normal(ROWS), np.zeros(size_of(tlp.SHAPES))
    tlp.Pass(views(flat, tlp.SHAPES), tokens).backward(pull, views(found, tlp.SHAPES))
    for name, places in views(np.arange(len(flat), dtype=np.float64), tlp.SHAPES).items():
        for i in rng.choice(places.reshape(-1), 3).astype(int):
            step = np.zeros(len(flat))
            step[i] = 1e-6
            up, down = (
                tlp.Pass(views(flat + s * step, tlp.SHAPES), tokens).score @ pull for s in (1, -1)
            )
            assert found[i] == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-6), name


def test_steps_that_are_not_there_do_not_count() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.standard_normal((ROWS, 5, tlp.TOKEN))
    tokens[:, :, 0] = np.arange(5) < rng.integers(1, 6, ROWS)[:, None]
    flat = tlp.initial(rng, "float64") + 0.1 * rng.standard_normal(size_of(tlp.SHAPES))
    junk = np.where(tokens[:, :, :1] > 0, tokens, 100.0)
    junk[:, :, 0] = tokens[:, :, 0]
    scores = [tlp.Pass(views(flat, tlp.SHAPES), t).score for t in (tokens, junk)]
    np.testing.assert_allclose(*scores)


def test_a_sentence_holds_the_sketch_and_its_decisions_and_nothing_else() -> None:
    """Nothing but names, values and options: the symbols are never asked for."""
    sketch = fakes.FakeSketch()
    sketch.symbols = None
    points = np.array([[8, 4, 8, 2], [8, 1, 8, 2]])
    found = tlp.sentences(sketch, points)
    assert found.shape == (2, 1 + len(sketch.names), tlp.TOKEN)
    assert (found[:, :, 0] == 1).all()
    assert (found[:, :, 1 : 1 + tlp.KINDS].sum(axis=2) == 1).all()
    same = (found[0] == found[1]).all(axis=1)
    assert same.tolist() == [True, True, False, True, True]
    other = tlp.sentences(fakes.FakeSketch("other"), points)
    assert (found != other).any(axis=2).tolist() == [[True, *[False] * 4]] * 2


def test_a_long_sketch_is_cut_off() -> None:
    sketch = fakes.FakeSketch("long", (2,) * 30, (0,) * 30, (0,) * 30)
    assert tlp.sentences(sketch, np.ones((1, 30), np.int64)).shape[1] == tlp.MAX_STEPS


def test_throughput_follows_the_best_and_is_nothing_for_failures() -> None:
    known = Measured()
    known.add(np.zeros((3, 2)), [2.0, math.inf, 4.0])
    np.testing.assert_allclose(known.throughput(), [1.0, 0.0, 0.5])
    known.add(np.ones((1, 2)), [1.0])
    np.testing.assert_allclose(known.throughput(), [0.5, 0.0, 0.25, 1.0])
    assert known.worked == 3
    known.add(np.zeros((MAX_KEPT, 2)), [1.0] * MAX_KEPT)
    assert len(known.seconds) == len(known.features) == MAX_KEPT


def test_lists_are_filled_up_with_what_does_not_count() -> None:
    short, long = Measured(), Measured()
    short.add(np.arange(3.0)[:, None], [1.0, 2.0, 4.0])
    long.add(np.arange(100.0)[:, None], list(np.arange(1.0, 101.0)))
    features, labels, counted = lists_of([short, long], np.random.default_rng(0))
    assert features.shape == (2 * ROWS, 1)
    assert counted.sum(axis=1).tolist() == [3, ROWS]
    assert sorted(labels[0, :3]) == [0.25, 0.5, 1.0]
    np.testing.assert_allclose(labels[1], 1.0 / (features[ROWS:, 0] + 1.0))
    assert len(np.unique(features[ROWS:, 0])) == ROWS


def test_features_of_baselines_hold_nothing_of_the_draft_model() -> None:
    task = fakes.make_task(64)
    for sketch in sketches_for(task):
        points = sketch.default()[None]
        plain = pattern.undrafted_features(task, sketch, points)
        whole = pattern.patterns(task, sketch, points).statement
        assert plain.shape[1] == whole.shape[1] - 3
        slower = pattern.statement_features(task, sketch, points, np.full(1, -50.0))
        changed = np.flatnonzero(slower[0] != whole[0])
        assert set(changed) <= set(pattern._DRAFTED)
        assert pattern._DRAFTED[0] in changed


def test_a_tree_knows_what_it_has_grown_from() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, (80, 5)).astype(float), rng.random(80)
    _, first = np.unique(x, axis=0, return_index=True)
    x, y = x[first], y[first]
    np.testing.assert_allclose(grow(x, y, rng).predict(x), y)
    assert grow(x[:1], y[:1], rng).predict(x).tolist() == [y[0]] * len(x)
    same = grow(np.ones((4, 2)), np.arange(4.0), rng)  # nothing to divide by
    assert same.predict(np.zeros((3, 2))).tolist() == [1.5] * 3


def test_thresholds_divide_even_neighbouring_floats() -> None:
    low = 1.0
    x = np.array([[low], [np.nextafter(low, 2.0)]])
    tree = grow(x, np.array([0.0, 1.0]), np.random.default_rng(0))
    assert tree.predict(x).tolist() in ([0.0, 1.0], [0.5, 0.5])


def test_the_improvement_to_expect() -> None:
    """Against sums over a normal distribution; without deviation it is what is above the best."""
    draws = np.random.default_rng(0).standard_normal(400_000)
    mean, deviation = np.array([0.9, 0.5, 1.0, 0.7]), np.array([0.2, 0.4, 0.1, 0.0])
    pairs = zip(mean, deviation, strict=True)
    summed = [np.maximum(m + s * draws - 1.0, 0).mean() for m, s in pairs]
    np.testing.assert_allclose(expected_improvement(mean, deviation), summed, rtol=0.02, atol=1e-9)


def test_trees_disagree_about_what_was_not_measured() -> None:
    sketch, task, model = fakes.FakeSketch(), fakes.make_task(), ForestModel()
    points = points_of(sketch, 200)
    assert model.deviation(task, sketch, points) is None
    model.update(task, [sketch], results_of(sketch, points[:60]))
    known, unknown = (model.deviation(task, sketch, p) for p in (points[:60], points[60:]))
    assert known.mean() < 0.8 * unknown.mean()
    assert (model.deviation(fakes.make_task(16), sketch, points)) is None


def test_a_forest_of_failures_waits() -> None:
    sketch, task, model = fakes.FakeSketch(), fakes.make_task(), ForestModel()
    points = points_of(sketch, 20)
    bad = results_of(sketch, points[:10], MeasureStatus.TIMEOUT)
    model.update(task, [sketch], bad)
    assert not model.predict(task, sketch, points).any()
    good = [MeasureResult(r.candidate, r.status, r.run_secs) for r in results_of(sketch, points)]
    model.update(task, [sketch], good[10:])
    assert np.ptp(model.predict(task, sketch, points)) > 0
