"""``bench``: turns, medians and ratios with invented clocks; backends that compile nothing."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torch_pruner.cli import bench
from torch_pruner.dynamo.run import reports
from torch_pruner.report import GraphReport

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., tuple[int, str, str]]


class Clock:
    """Moves only when a call says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, *seconds: float) -> Callable[[], None]:
        """A function whose calls take these times in turn."""
        times = list(seconds)

        def function() -> None:
            self.log.append(name)
            self.now += times[0]
            times.append(times.pop(0))

        return function


def test_contenders_take_turns_and_the_order_rotates() -> None:
    clock = Clock()
    samples = bench.interleave({"a": clock.call("a", 1.0), "b": clock.call("b", 2.0)}, 3, clock)
    assert samples == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert "".join(clock.log) == "aabb" + "aabb" + "bbaa" + "aabb"


def test_short_calls_are_timed_in_groups() -> None:
    clock = Clock()
    samples = bench.interleave({"a": clock.call("a", 2**-20)}, 1, clock)
    assert samples["a"] == [2**-20]
    assert len(clock.log) == 2 + 1 + math.ceil(bench.MIN_SAMPLE_S * 2**20)


def test_the_ratio_is_taken_round_by_round() -> None:
    """A machine that slows down midway slows both: the ratio of medians would not notice."""
    seconds = {"pruner": [1.0, 1.0, 5.0], "eager": [2.0, 2.0, 10.0], "slow": [3.0, 30.0, 15.0]}
    first, difference = dict.fromkeys(seconds, 9.0), dict.fromkeys(seconds, 0.0)
    found = {c.name: c for c in bench.contenders(seconds, first, difference)}
    assert found["eager"].ratio == 2.0
    assert found["slow"].ratio == 3.0
    assert (found["eager"].median_s, found["eager"].q1_s, found["eager"].q3_s) == (2.0, 2.0, 6.0)
    assert bench.contenders({"pruner": [1.0]}, first, difference)[0].q3_s == 1.0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, here: Any) -> list[dict[str, Any]]:
    """``torch.compile`` hands the module back; our backend reports one graph."""
    calls: list[dict[str, Any]] = []

    def fake(module: Any, *, backend: str, **more: Any) -> Any:
        calls.append({"backend": backend, **more})

        def call(*args: Any, **kwargs: Any) -> Any:
            if backend == "pruner":
                reports.add(GraphReport("graph0", 1, 1, 1, 1, 1))
            if backend == "cudagraphs":
                raise RuntimeError("no GPU\nat all")
            return module(*args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", fake)
    monkeypatch.setattr(bench, "MIN_SAMPLE_S", 0.0)
    return calls


def test_the_table(run: Run, compiled: list[dict[str, Any]]) -> None:
    status, out, _ = run("bench", "net.py:make", "--rounds", "2", "--set", "library=0")
    assert status == 0
    assert "inputs: 0: 3x4" in out
    lines = out.splitlines()
    assert lines[2].split() == [
        "backend", "median", "quartiles", "pruner", "is", "first", "call", "difference",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[3:6]] == ["pruner", "eager", "inductor"]
    assert lines[-1].startswith("complete:")
    ours = next(c for c in compiled if c["backend"] == "pruner")
    assert ours == {"backend": "pruner", "options": {"library": False}, "dynamic": False}


def test_json(run: Run, compiled: list[dict[str, Any]]) -> None:
    argv = ("--inputs", "net.py:two_shapes", "--against", "eager", "--rounds", "2", "--json")
    status, out, _ = run("bench", "net.py:bare", *argv)
    assert status == 0
    data = json.loads(out)
    assert [c["inputs"] for c in data["comparisons"]] == ["0: 1x4", "input: 2x4"]
    first = data["comparisons"][0]["contenders"]
    assert [c["name"] for c in first] == ["pruner", "eager"]
    assert first[0]["ratio"] == 1.0
    assert data["report"]["ops_compiled"] > 0


def test_a_contender_that_fails_is_a_line_and_status_1(
    run: Run, compiled: list[dict[str, Any]]
) -> None:
    argv = ("--against", "eager,cudagraphs", "--rounds", "1")
    status, out, _ = run("bench", "net.py:make", *argv)
    assert status == 1
    assert "cudagraphs failed: RuntimeError: no GPU\n" in out


def test_a_backend_that_nobody_knows(run: Run, compiled: list[dict[str, Any]]) -> None:
    status, out, err = run("bench", "net.py:make", "--against", "eager,turbo")
    assert (status, "turbo" in err.splitlines()[-1]) == (2, True)
    assert out == "the user's code prints\n"


def test_differences_are_relative_to_eager_s_largest_output() -> None:
    eager = {"a": torch.tensor([4.0, -8.0]), "b": (torch.tensor([True]), None)}
    ours = {"a": torch.tensor([4.0, -7.0]), "b": (torch.tensor([True]), None)}
    assert bench.difference(ours, eager) == 0.125
    assert bench.difference(eager, eager) == 0.0
