"""MetaSchedule driven by its own code: what it found can be timed by ours. Needs xgboost."""

from __future__ import annotations

import math

import pytest

from tests import fakes
from torch_pruner.task import Candidate

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
