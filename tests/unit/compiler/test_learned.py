"""The weights that tuning sessions hand to each other through the cache's directory."""

from __future__ import annotations

import hashlib
import logging
import os

import numpy as np
import pytest

from tests import fakes
from tests.contracts.cost_model import results_of
from torch_pruner.cache import learned as files
from torch_pruner.compiler.remembered import learned
from torch_pruner.config import Config
from torch_pruner.target import TargetSpec
from torch_pruner.tuner import make_strategy
from torch_pruner.tuner.cost_model.analytic import AnalyticModel
from torch_pruner.tuner.cost_model.moa import MomentumModel
from torch_pruner.tuner.cost_model.pacm import PatternAwareModel
from torch_pruner.tuner.cost_model.residual import ResidualModel

TARGET = TargetSpec.detect()


@pytest.fixture
def config(tmp_path, monkeypatch) -> Config:
    monkeypatch.setattr(learned, "SHIPPED", tmp_path / "shipped")
    files.path_of(tmp_path, "x").parent.parent.mkdir(parents=True)
    return Config(cache_dir=str(tmp_path))


def train(model) -> None:
    sketch = fakes.FakeSketch()
    rng = np.random.default_rng(0)
    points = np.stack([rng.choice(d, 16) for d in sketch.domains], axis=1)
    model.update(fakes.make_task(), [sketch], results_of(sketch, points))


def place(config: Config):
    return files.path_of(config.cache_root, "moa-llvm")


def test_without_weights_moa_is_the_residual_model(config) -> None:
    assert isinstance(learned.cost_model_for(config, TARGET), ResidualModel)
    pacm = learned.cost_model_for(config.replace(cost_model="pacm"), TARGET)
    assert type(pacm) is PatternAwareModel


def test_the_weights_in_the_package_are_those_of_their_card(tmp_path) -> None:
    """They are read by this version, and the card beside them speaks of these bytes."""
    file = learned.SHIPPED / "llvm.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert digest in file.with_suffix(".md").read_text()
    model = learned.cost_model_for(Config(cache_dir=str(tmp_path)), TARGET)
    assert isinstance(model, MomentumModel)
    assert model.weights().updates > 0


def test_offline_weights_are_never_trained(config, caplog) -> None:
    offline = config.replace(cost_model="offline")
    assert isinstance(learned.cost_model_for(offline, TARGET), AnalyticModel)
    assert "no weights for llvm" in caplog.text
    trained = MomentumModel(0)
    train(trained)
    learned.keep(trained, config, TARGET)
    before = place(config).read_bytes()
    model = learned.cost_model_for(offline, TARGET)
    sketch, task = fakes.FakeSketch(), fakes.make_task()
    points = np.stack([np.array([v[0], v[-1]]) for v in sketch.domains], axis=1)
    scores = model.predict(task, sketch, points)
    train(model)
    np.testing.assert_array_equal(model.predict(task, sketch, points), scores)
    learned.keep(model, offline, TARGET)
    assert place(config).read_bytes() == before
    strategy = make_strategy("draft-verify", model)
    assert isinstance(strategy.draft_model, AnalyticModel)


def test_sessions_go_on_from_each_other(config) -> None:
    first = MomentumModel(0)
    train(first)
    learned.keep(first, config, TARGET)
    second = learned.cost_model_for(config, TARGET)
    assert isinstance(second, MomentumModel)
    np.testing.assert_array_equal(second.weights().flat, first.weights().flat)
    train(second)
    learned.keep(second, config, TARGET)
    third = learned.cost_model_for(config, TARGET)
    assert third.weights().updates == first.weights().updates + 1
    assert [p.name for p in place(config).parent.iterdir()] == ["moa-llvm.safetensors"]


def test_shipped_weights_are_used_where_the_cache_has_none(config) -> None:
    model = MomentumModel(0)
    train(model)
    learned.SHIPPED.mkdir()
    (learned.SHIPPED / "llvm.safetensors").write_bytes(model.weights().to_bytes())
    found = learned.cost_model_for(config, TARGET)
    assert isinstance(found, MomentumModel)
    assert not found.changed


def test_what_learned_nothing_is_not_kept(config) -> None:
    for model in (ResidualModel(), MomentumModel(0), PatternAwareModel(0)):
        learned.keep(model, config, TARGET)
    assert not place(config).exists()


@pytest.mark.parametrize("content", [b"", b"junk", b"x" * (files.MAX_BYTES + 1)])
def test_a_damaged_file_is_ignored_with_a_warning(config, caplog, content) -> None:
    place(config).parent.mkdir()
    place(config).write_bytes(content)
    with caplog.at_level(logging.WARNING, "torch_pruner"):
        assert isinstance(learned.cost_model_for(config, TARGET), ResidualModel)
    assert "ignoring the weights" in caplog.text


def test_a_directory_that_cannot_be_written_costs_a_warning(config, caplog, monkeypatch) -> None:
    model = MomentumModel(0)
    train(model)
    before = learned.cost_model_for(config, TARGET)

    def refuse(*_: object) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr(os, "replace", refuse)
    with caplog.at_level(logging.WARNING, "torch_pruner"):
        learned.keep(model, config, TARGET)
    assert "cannot be kept" in caplog.text
    assert list(place(config).parent.iterdir()) == []
    assert isinstance(before, ResidualModel)
