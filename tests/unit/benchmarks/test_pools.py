"""Searches replayed on records: what is asked, in which order, and what the summaries say."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import numpy as np
import pytest

from benchmarks import card, draft, pools, train, transfer
from benchmarks.records import Measured
from tests import fakes
from torch_pruner.families import sketches_for
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureResult, MeasureStatus, Task
from torch_pruner.tuner.cost_model.analytic import AnalyticModel
from torch_pruner.tuner.cost_model.weights import Weights
from torch_pruner.tuner.search.space import SketchSpace

TASK = Task("linear", fakes.linear_spec(64, 128, 96), TargetSpec.detect(), 2)


@pytest.fixture(scope="module")
def pool() -> pools.Pool:
    """A small linear layer, measured as the draft model says, but for one lucky point."""
    task = TASK
    sketch = next(s for s in sketches_for(task) if s.name == "contraction")
    space = SketchSpace(sketch)
    rows = space.random(20_000, np.random.default_rng(0))[:100]
    seconds = sketch.symbols(space.decisions(rows)).latency_s
    seconds[np.argsort(seconds)[70]] = seconds.min() / 2
    results = [
        MeasureResult(c, MeasureStatus.OK, (float(s),))
        for c, s in zip(space.candidates(rows), seconds, strict=True)
    ]
    results[0] = MeasureResult(results[0].candidate, MeasureStatus.TIMEOUT)
    unknown = MeasureResult(Candidate("gone", (("x", 1),)), MeasureStatus.OK, (1e-9,))
    found = pools.pool_of(Measured(task, "device", [*results, unknown]))
    assert found is not None
    return found


def test_a_pool_leaves_out_what_no_sketch_knows(pool) -> None:
    assert len(pool.results) == 100
    assert pool.best_s > 1e-9


def test_a_task_of_few_records_is_no_pool(pool) -> None:
    few = [r for r in pool.results if r.status is MeasureStatus.OK][: pools.LEAST - 1]
    assert pools.pool_of(Measured(pool.task, "device", few)) is None


def test_a_replay_measures_the_whole_pool_once(pool) -> None:
    (curve,) = pools.replay([pool], AnalyticModel(), seed=0, turns=transfer.turns(1000))
    assert len(curve) == 100
    assert curve == sorted(curve, reverse=True)
    assert curve[-1] == pool.best_s
    (again,) = pools.replay([pool], AnalyticModel(), seed=0, turns=transfer.turns(1000))
    assert again == curve


@pytest.mark.parametrize(("trials", "turns"), [(1, 1), (4, 1), (5, 2), (12, 2), (60, 8)])
def test_turns_hold_the_trials(trials, turns) -> None:
    assert transfer.turns(trials) == turns


def test_best1_is_the_share_of_the_best_that_was_drafted(pool) -> None:
    assert draft.best1(pool, 100) == 1.0
    assert draft.best1(pool, 50) == pytest.approx(0.5)
    row = draft.row_of(pool, 0.5, seed=0)
    assert (row["measured"], row["drafted"], row["best1"]) == (100, 50, pytest.approx(0.5))
    assert all(r > 0 for r in row["rates"].values())


def test_transfer_counts_trials_until_the_reference_s_result() -> None:
    reference = [[9.0, 8.0, 8.0, 4.0], [3.0, 3.0, 3.0, 3.0], [math.inf] * 4]
    ours = [[9.0, 4.0, 4.0, 4.0], [5.0, 5.0, 5.0, 4.0], [1.0] * 4]
    alone = [[9.0, 8.0, 8.0, 8.0], [3.0, 3.0, 3.0, 3.0], [math.inf] * 4]
    curves = {
        transfer.REFERENCE: reference,
        "ours": ours,
        transfer.ALONE + transfer.REFERENCE: alone,
    }
    rows = transfer.summary(curves, [2.0, 3.0, 1.0])
    assert rows[transfer.REFERENCE] == {
        "trials": 1.0,
        "never": 0,
        "tied": 1.0,
        "paper": 1.0,
        "best": pytest.approx(math.sqrt(0.5)),
    }
    assert rows["ours"]["trials"] == pytest.approx(math.sqrt(2 / 4 * 4 / 1))
    assert rows["ours"]["never"] == 1
    assert rows["ours"]["paper"] == pytest.approx(math.sqrt(2 / 2 * 4 / 1))
    assert rows["ours"]["best"] == pytest.approx((0.5 * 0.75) ** (1 / 3))


def test_transfer_counts_trials_until_a_tie_too() -> None:
    reference = [[9.0, 8.0, 4.1, 4.0]]
    ours = [[9.0, 4.05, 4.05, 4.05]]
    rows = transfer.summary({transfer.REFERENCE: reference, "ours": ours}, [4.0])
    assert rows["ours"]["trials"] == 1.0
    assert rows["ours"]["never"] == 1
    assert rows["ours"]["tied"] == pytest.approx(2 / 3)


def test_training_sees_every_record_in_parts_of_a_list_s_size(pool, monkeypatch) -> None:
    monkeypatch.setattr(train, "MAX_LISTED", 10)
    parts = train._lists(pool, np.random.default_rng(0))
    assert len(parts) == -(-len(pool.results) // 10)
    assert max(len(p.seconds) for p in parts) <= 10
    seen = sorted(s for part in parts for s in part.seconds)
    assert seen == sorted(r.latency_s for r in pool.results)


def test_weights_are_trained_and_ranked_by(pool) -> None:
    weights = train.train([pool], steps=3, seed=0)
    again = train.train([pool], steps=3, seed=0)
    assert np.array_equal(weights.flat, again.flat)
    assert weights.updates == 3
    assert len(train._features(pool)) == len(pool.results)


def test_what_was_measured_twice_is_asked_for_its_first_times(pool) -> None:
    """The best was unlucky at first, and the second best is then taken for it."""
    order = np.argsort([r.latency_s for r in pool.results], kind="stable")
    best, second = (pool.results[i] for i in order[:2])
    slow = MeasureResult(best.candidate, MeasureStatus.OK, (2 * second.latency_s,))
    twice = dataclasses.replace(pool, earlier={best.candidate: slow})
    first, five = train._top(twice, train._measured_before)
    assert first == pytest.approx(best.latency_s / second.latency_s)
    assert first <= five <= 1.0
    assert train._top(pool, train._measured_before) == [1.0, 1.0]
    again = train.timed_again([twice, pool])
    assert again["times"] == 1
    assert again["mean"] == again["median"] == pytest.approx(best.latency_s / slow.latency_s)


def test_weights_come_with_a_card(pool, tmp_path, monkeypatch) -> None:
    other = dataclasses.replace(pool, device="A processor")
    monkeypatch.setattr(train, "load", lambda _paths: ([other], 0))
    out = tmp_path / "llvm.safetensors"
    assert train.main(["records.jsonl", "--folds", "1", "--steps", "2", "--out", str(out)]) == 0
    weights = out.read_bytes()
    assert Weights.from_bytes(weights).updates == 2
    text = out.with_suffix(".md").read_text()
    assert hashlib.sha256(weights).hexdigest() in text
    assert "--steps 2" in text
    assert f"| A processor | {TASK.target.mcpu} | 2 | 1 | 100 |" in text
    assert "Tasks: linear." in text
    assert "held out" not in text


def test_long_lists_of_names_are_broken() -> None:
    text = card._wrapped([f"matmul_{n}" for n in range(40)])
    assert max(map(len, text.splitlines())) <= card.WIDTH
    assert text.count(",") == 39
    assert text.endswith("matmul_39.")
