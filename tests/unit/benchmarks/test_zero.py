"""The first choice judged by records: what counts, and what the figures are."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from benchmarks import regret, zero
from benchmarks.records import Measured
from tests import fakes
from torch_pruner.families import sketches_for
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureResult, MeasureStatus, Task
from torch_pruner.tuner.roofline import roofline_s
from torch_pruner.tuner.search.space import SketchSpace

TASK = Task("linear", fakes.linear_spec(64, 128, 96), TargetSpec.detect(), 2)


def result(candidate: Candidate, seconds: float) -> MeasureResult:
    return MeasureResult(candidate, MeasureStatus.OK, (seconds,))


@pytest.fixture(scope="module")
def measured() -> Measured:
    """Forty points of a small linear layer, each as fast as the draft model says."""
    sketch = next(s for s in sketches_for(TASK) if s.name == "contraction")
    space = SketchSpace(sketch)
    rows = space.random(20_000, np.random.default_rng(0))[:40]
    seconds = 1e-3 + sketch.symbols(space.decisions(rows)).latency_s
    points = zip(space.candidates(rows), seconds, strict=True)
    return Measured(TASK, "device", [result(c, float(s)) for c, s in points], device_name="cpu")


def test_top1_is_the_best_over_the_favourite() -> None:
    assert regret.top1([2.0, 1.0, 4.0], [0.0, 1.0, 2.0]) == 0.25
    assert regret.top1([2.0, 1.0, 4.0], [0.0, 1.0, 0.5]) == 1.0
    assert regret.top1([2.0, 1.0], [3.0, 3.0]) == 0.5  # of equals the first


def test_means_are_geometric() -> None:
    assert regret.geometric_mean([0.25, 1.0]) == pytest.approx(0.5)
    assert math.isnan(regret.geometric_mean([]))
    assert regret.by_chance([1.0, 4.0, 2.0]) == pytest.approx(0.5)


def test_everything_counts_that_today_can_choose(measured) -> None:
    found = regret.usable(measured)
    assert found.pool is not None
    assert found.states == {regret.USABLE: 40}


def test_stale_points_are_told_apart(measured) -> None:
    first = dict(measured.results[0].candidate.decisions)
    wider = Candidate("contraction", tuple(sorted({**first, "tm": 99}.items())))
    invalid = Candidate("contraction", tuple(sorted({**first, "tm": 16, "nv": 6}.items())))
    other = Candidate("contraction", tuple(sorted({**first, "more": 1}.items())))
    gone = Candidate("gone", (("x", 1),))
    failed = MeasureResult(measured.results[0].candidate, MeasureStatus.TIMEOUT)
    stale = [result(c, 1e-3) for c in (wider, invalid, other, gone)]
    found = regret.usable(Measured(TASK, "device", [*measured.results[1:], *stale, failed]))
    assert found.states == {
        regret.USABLE: 39, regret.OUTSIDE: 2, regret.OTHER: 1, regret.GONE: 1, regret.FAILED: 1,
    }  # fmt: skip
    assert found.pool is not None
    assert len(found.pool.results) == 39


def test_too_few_points_are_no_pool(measured) -> None:
    assert regret.usable(Measured(TASK, "device", measured.results[:5])).pool is None


def test_times_that_cannot_be_give_way_to_first_ones(measured) -> None:
    never = 0.1 * roofline_s(TASK)
    a, b, *rest = measured.results
    lies = [result(a.candidate, never), result(b.candidate, never), *rest]
    earlier = {a.candidate: a}
    found = regret.usable(Measured(TASK, "device", lies, earlier))
    assert found.states == {regret.USABLE: 39, regret.UNBELIEVABLE: 1}
    assert found.pool is not None
    assert found.pool.results[0] is a


@pytest.mark.parametrize(("speed", "kept"), [(0.5, False), (0.9, True), (2.0, False)])
def test_second_times_of_a_machine_of_another_speed_do_not_count(measured, speed, kept) -> None:
    a, b, *rest = measured.results
    again = [result(r.candidate, speed * r.latency_s) for r in (a, b)]
    earlier = {a.candidate: a, b.candidate: b}
    found = regret.on_one_scale([*again, *rest], earlier)
    assert found == [*(again if kept else [a, b]), *rest]


def test_once_asks_for_first_times(measured) -> None:
    a, b, *_ = measured.results
    found = regret.usable(measured).pool
    assert found is not None
    assert regret.once(found) is None
    twice = {a.candidate: result(a.candidate, 1.0), b.candidate: result(b.candidate, 2.0)}
    pair = [result(a.candidate, 4.0), result(b.candidate, 3.0)]
    again = dataclasses.replace(found, results=[*pair, *measured.results[2:]], earlier=twice)
    assert regret.once(again) == 0.75


def test_a_perfect_draft_model_has_no_regret(measured) -> None:
    pool = regret.usable(measured).pool
    assert pool is not None
    row = zero.row_of(pool, "file", "net")
    assert row.top[zero.DRAFT] == 1.0
    assert row.top[zero.RANDOM] < 1.0
    assert row.family == "contraction"
    assert row.draft_s > 0
    table = zero.grouped([row, dataclasses.replace(row, network="other")], "network", _network)
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == [
        "| net",
        "| other",
        "| all",
    ]
    assert "1.000 (1.00)" in table


def _network(row: zero.Row) -> str:
    return row.network


def test_nothing_is_learned_of_what_is_left_out(measured, monkeypatch) -> None:
    pool = regret.usable(measured).pool
    assert pool is not None
    kinds = [("a", "one"), ("a", "two"), ("b", "one"), ("b", "two")]
    row = zero.row_of(pool, "file", "a")
    rows = [dataclasses.replace(row, network=n, processor=p, top={}, name=n + p) for n, p in kinds]
    pools = [dataclasses.replace(pool, device=r.name) for r in rows]
    learned: list[list[str]] = []
    asked: dict[str, list[str]] = {}

    def train(some, steps, seed):
        learned.append([p.device for p in some])
        return learned[-1]

    def rank(some, pools, name, weights):
        if name != zero.RELEASED:
            asked.setdefault(name, []).extend(f"{r.name} of {'+'.join(weights)}" for r in some)

    monkeypatch.setattr("benchmarks.train.train", train)
    monkeypatch.setattr(zero, "_rank", rank)
    zero.judge(rows, pools, steps=1, seed=0)
    network, processor, both = zero.LEFT_OUT.values()
    assert asked[network][:2] == ["aone of bone+btwo", "atwo of bone+btwo"]
    assert asked[processor][:2] == ["aone of atwo+btwo", "bone of atwo+btwo"]
    assert asked[both] == [
        "aone of btwo", "atwo of bone", "bone of atwo", "btwo of aone",
    ]  # fmt: skip


def test_committed_networks_have_names() -> None:
    names = json.loads((zero.FOLDER / "networks.json").read_text())
    assert all(len(workload) == 16 for workload in names)
    assert {"resnet50", "bert_base", "mobilenet_v2"} <= set(names.values())
