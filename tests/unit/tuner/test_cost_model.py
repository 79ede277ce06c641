"""Cost models against their contract; what the residual model learns."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests import fakes
from tests.contracts.cost_model import CostModelContract, results_of
from torch_pruner.exc import OptionError
from torch_pruner.task import MeasureResult, MeasureStatus
from torch_pruner.tuner import COST_MODELS, make_cost_model
from torch_pruner.tuner.cost_model.analytic import AnalyticModel
from torch_pruner.tuner.cost_model.mlp import TensetMLP
from torch_pruner.tuner.cost_model.random_model import RandomModel
from torch_pruner.tuner.cost_model.residual import ResidualModel


class TestAnalyticModel(CostModelContract):
    @pytest.fixture
    def model(self):
        return AnalyticModel()


class TestRandomModel(CostModelContract):
    @pytest.fixture
    def model(self):
        return RandomModel(3)


class TestResidualModel(CostModelContract):
    @pytest.fixture
    def model(self):
        return ResidualModel()


class TestTensetMLP(CostModelContract):
    @pytest.fixture
    def model(self):
        return TensetMLP()


class TestXGBoostModel(CostModelContract):
    @pytest.fixture
    def model(self):
        pytest.importorskip("xgboost")
        from torch_pruner.tuner.cost_model.xgb_model import XGBoostModel

        return XGBoostModel()


def test_scores_that_are_no_numbers_become_finite() -> None:
    sketch = fakes.FakeSketch()
    sketch.symbols = lambda d: fakes.FakeSymbols(np.array([np.nan, np.inf, 0.0, 1.0]), np.ones(4))
    scores = AnalyticModel().predict(fakes.make_task(), sketch, np.ones((4, 4), dtype=np.int64))
    assert np.isfinite(scores).all()
    assert scores.argsort().tolist()[2:] == [3, 2]


@pytest.mark.parametrize("name", ["residual", "xgb"])
def test_learning_improves_the_ranking(name) -> None:
    if name == "xgb":
        pytest.importorskip("xgboost")
    sketch, task = fakes.FakeSketch(believed=(1, 4, 0, 0)), fakes.make_task()
    rng = np.random.default_rng(0)
    points = np.unique(np.stack([rng.choice(d, 300) for d in sketch.domains], 1), axis=0)
    rng.shuffle(points)
    model = make_cost_model(name)
    train, test = points[:60], points[60:]
    before = _rank_correlation(model.predict(task, sketch, test), sketch.latency_s(test))
    model.update(task, [sketch], results_of(sketch, train[:30]))
    model.update(task, [sketch], results_of(sketch, train[30:]))
    after = _rank_correlation(model.predict(task, sketch, test), sketch.latency_s(test))
    assert after > 0.8
    assert after > before + 0.2


def test_residual_near_a_failure_is_penalised() -> None:
    sketch, task, model = fakes.FakeSketch(), fakes.make_task(), ResidualModel()
    points = np.array([[8, 4, 8, 2], [1, 1, 1, 1], [32, 1, 1, 8]])
    good = results_of(sketch, points[1:])
    bad = [MeasureResult(results_of(sketch, points[:1])[0].candidate, MeasureStatus.TIMEOUT)]
    model.update(task, [sketch], good + bad)
    top = AnalyticModel().predict(task, sketch, points).argmax()
    assert model.predict(task, sketch, points).argmin() != 1 or top == 0
    mean = model._means[task.workload, sketch.name]
    plain = AnalyticModel().predict(task, sketch, points) - mean
    assert model.predict(task, sketch, points)[0] < plain[0] - 0.5


def test_residual_offset_reaches_a_sketch_not_measured_yet() -> None:
    """A task's common error must not make an unmeasured sketch look good or bad."""
    a, b, task = fakes.FakeSketch("a"), fakes.FakeSketch("b"), fakes.make_task()
    model = ResidualModel()
    points = np.array([[8, 4, 8, 2], [4, 4, 4, 2]])
    before = model.predict(task, b, points)
    slow = [
        MeasureResult(r.candidate, r.status, tuple(10 * s for s in r.run_secs))
        for r in results_of(a, points)
    ]
    model.update(task, [a, b], slow)
    assert (model.predict(task, b, points) < before - 1.0).all()


def test_registry_knows_every_option_value() -> None:
    from torch_pruner.config import OPTIONS

    for name in COST_MODELS:
        if name not in ("residual", "mlp", "tlp", "trees", "forest"):  # of benchmarks
            OPTIONS["cost_model"].parse(name)
    with pytest.raises(OptionError, match="nonsense"):
        make_cost_model("nonsense")


@pytest.mark.parametrize("name", ["xgb", "trees"])
def test_without_xgboost_the_error_names_the_extra(name) -> None:
    script = (
        "import sys; sys.modules['xgboost'] = None\n"
        "from torch_pruner.tuner import make_cost_model\n"
        f"try: make_cost_model({name!r})\n"
        "except Exception as err: print(type(err).__name__, err)\n"
    )
    import os

    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=60
    )
    assert "OptionError" in done.stdout
    assert f"{name!r} needs xgboost" in done.stdout
    assert "torch_pruner[xgboost]" in done.stdout


def _rank_correlation(scores: np.ndarray, latencies: np.ndarray) -> float:
    return float(np.corrcoef(scores.argsort().argsort(), (-latencies).argsort().argsort())[0, 1])
