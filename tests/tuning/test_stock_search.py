"""MetaSchedule driven by its own code: what it found can be timed by ours. Needs xgboost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests import fakes
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureInput, MeasureStatus, Task

pytestmark = pytest.mark.tvm


def test_what_it_finds_is_a_candidate_of_ours() -> None:
    pytest.importorskip("xgboost")
    from benchmarks import search, stock_search

    task = fakes.make_task(64)
    found = stock_search.search(task, search.UNTOUCHED, 0, 4)
    assert found["trials"] == 4
    assert found["events"]
    times = [e["seconds"] for e in found["events"]]
    assert times == sorted(times)
    assert times[-1] <= found["seconds"]
    again = search.timed_again(task, [found])
    for event in found["events"]:
        assert Candidate.from_json(event["candidate"]).digest == event["digest"]
        assert math.isfinite(again[event["digest"]])


@pytest.mark.stress  # a minute
def test_a_convolution_is_searched_with_its_epilogue_and_its_weights_are_packed() -> None:
    """Its rules raise for an epilogue that they can neither inline nor move into the tiles, and
    would leave each permutation in a loop of its own.
    """
    from torch_pruner.tuner import make_cost_model, make_strategy
    from torch_pruner.tuner.measure.local import LocalExecutor

    b = GraphBuilder()
    x = b.permute(b.input(0, (1, 14, 14, 16), "float32"), (0, 3, 1, 2))
    w = b.input(1, (32, 16, 3, 3), "float32", static=True)
    same = {"stride": (1, 1), "lo": (1, 1), "hi": (1, 1), "dilation": (1, 1), "groups": 1}
    y = b.append("conv", (x, w), (1, 32, 14, 14), "float32", **same)
    for k, op in ((2, "mul"), (3, "add")):
        one = b.reshape(b.input(k, (32,), "float32", static=True), (32, 1, 1))
        y = b.pointwise(op, y, one)
    spec = b.finish([b.permute(b.pointwise("relu", y), (0, 2, 3, 1))])
    task = Task("conv", spec, TargetSpec.detect(2), 2)
    strategy = make_strategy("metaschedule", make_cost_model("random"), 0)
    strategy.start(task, [], rng=np.random.default_rng(0))  # its whole space is made here
    batch = strategy.propose(3)
    assert all("in1_extent0" in dict(c.decisions) for c in batch)
    with LocalExecutor(2, seed=0) as executor:
        results = executor.measure([MeasureInput(task, c) for c in batch])
        other = replace(batch[0], decisions=batch[1].decisions)
        (odd,) = executor.measure([MeasureInput(task, other)])
    assert [r.status for r in results] == [MeasureStatus.OK] * 3
    assert odd.status is MeasureStatus.BUILD_ERROR


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", *(pytest.param(d, marks=pytest.mark.rotated(6)) for d in ("float64", "int32"))],
)
def test_arithmetic_without_a_plain_form_is_searched_too(dtype) -> None:
    from torch_pruner.tuner import make_cost_model, make_strategy

    b = GraphBuilder()
    y = b.pointwise("sign", b.pointwise("neg", b.input(0, (64, 64), dtype)))
    spec = b.finish([b.pointwise("cast", b.pointwise("maximum", y, y), dtype="float32")])
    task = Task("pointwise", spec, TargetSpec.detect(2), 2)
    strategy = make_strategy("metaschedule", make_cost_model("random"), 0)
    strategy.start(task, [], rng=np.random.default_rng(0))
