"""At full effort kernels are judged inside the network: what wins there runs from then on."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

import torch_pruner
from tests.fakes import FakeExecutor
from torch_pruner import exc
from torch_pruner.compiler import recut
from torch_pruner.devices.cpu import CpuDevice
from torch_pruner.dynamo.run import checked, in_double, network_finals
from torch_pruner.task import MeasureResult, MeasureStatus

pytestmark = pytest.mark.tvm


class Level(FakeExecutor):
    """All schedules but the first of a task are about as fast."""

    def __init__(self) -> None:
        super().__init__(self.one)
        self.seen: dict[str, list[str]] = {}

    def one(self, given) -> MeasureResult:
        seen = self.seen.setdefault(given.task.workload, [])
        if given.candidate.digest not in seen:
            seen.append(given.candidate.digest)
        place = seen.index(given.candidate.digest)
        seconds = 1e-4 * (1.05 if place == 0 else 1.0 + 0.001 * place)
        return MeasureResult(given.candidate, MeasureStatus.OK, (seconds,))


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Level:
    by = Level()
    monkeypatch.setattr(CpuDevice, "executor", lambda self, config, threads: by)
    return by


@pytest.fixture(autouse=True)
def as_rules_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other cut is worth a race."""
    monkeypatch.setattr(recut, "ABOUT", 0.0)


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 32)).eval()


@pytest.fixture
def options(tmp_path: Any) -> dict[str, Any]:
    return {
        "cache_dir": str(tmp_path), "library": False, "strict": True, "trials": 24,
        "effort": "full", "threads": 1,
    }  # fmt: skip


X = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))


def called(net: nn.Module, options: dict[str, Any]) -> Any:
    torch.compiler.reset()
    with torch.no_grad():
        function = torch.compile(net, backend="pruner", options=options)
        for _ in range(3):
            torch.testing.assert_close(function(X), net(X), rtol=1e-4, atol=1e-5)
    return torch_pruner.last_report()


def digests(report: Any) -> dict[str, str]:
    return {task.workload: task.digest for task in report.tasks}


def judged(monkeypatch: pytest.MonkeyPatch, verdict: Any) -> list[Any]:
    """Races end as ``verdict`` says of how many there were before."""
    races: list[Any] = []

    def race(rival: Any, incumbent: Any, clock: Any) -> bool:
        rival()
        incumbent()
        races.append((rival, incumbent))
        return bool(verdict(len(races)))

    monkeypatch.setattr(network_finals, "wins", race)
    return races


def test_what_wins_runs_and_is_what_the_next_process_finds(
    monkeypatch: pytest.MonkeyPatch, executor: Level, net: nn.Module, options: dict[str, Any]
) -> None:
    races = judged(monkeypatch, lambda n: True)
    report = called(net, options)
    assert len(races) > 2, "groups of kernels, and once more in the end"
    drafts = {w: seen[0] for w, seen in executor.seen.items()}
    found = digests(report)
    assert set(found) == set(drafts)
    measured = executor.n_measured
    races.clear()
    again = called(net, options)
    assert digests(again) == found
    assert again.sources["cache"] == len(found)
    assert (executor.n_measured, races) == (measured, []), "nothing is tuned or judged again"
    served = called(net, {**options, "on_miss": "error"})
    assert digests(served) == found, "its library was kept, too"


def test_what_loses_changes_nothing_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, executor: Level, net: nn.Module, options: dict[str, Any]
) -> None:
    races = judged(monkeypatch, lambda n: False)
    found = digests(called(net, options))
    assert races
    for workload, digest in found.items():
        assert digest != executor.seen[workload][0], "the search's own choice"
    assert digests(called(net, {**options, "on_miss": "error"})) == found


def test_what_does_not_win_once_more_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, executor: Level, net: nn.Module, options: dict[str, Any]
) -> None:
    races = judged(monkeypatch, lambda n: n == 1)
    found = digests(called(net, options))
    assert len(races) > 1
    for workload, digest in found.items():
        assert digest != executor.seen[workload][0]


def test_what_goes_wrong_meanwhile_is_a_warning_and_the_call_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    executor: Level,
    net: nn.Module,
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: Any) -> bool:
        raise exc.CompileError("kernel", "no space is left")

    monkeypatch.setattr(network_finals, "wins", broken)
    with caplog.at_level(logging.WARNING, "torch_pruner"):
        called(net, options)
    assert "no space is left" in caplog.text


def test_what_differs_from_eager_is_never_in_the_store(
    monkeypatch: pytest.MonkeyPatch,
    executor: Level,
    net: nn.Module,
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    judged(monkeypatch, lambda n: True)
    real, asked = checked.differences, []

    def differences(got: Any, expected: Any) -> list[float]:
        asked.append(1)
        return real(got, expected) if len(asked) == 1 else [math.inf] * len(got)

    monkeypatch.setattr(checked, "differences", differences)
    monkeypatch.setattr(in_double, "bounds_by_double", lambda *_: {})
    with caplog.at_level(logging.WARNING, "torch_pruner"):
        found = digests(called(net, options))
    assert len(asked) > 1
    assert "its kernels stay as they are" in caplog.text
    monkeypatch.setattr(checked, "differences", real)
    assert digests(called(net, {**options, "on_miss": "error"})) == found


def test_graphs_of_several_regions_and_steps_of_training_are_judged_too(
    monkeypatch: pytest.MonkeyPatch, executor: Level, options: dict[str, Any]
) -> None:
    races = judged(monkeypatch, lambda n: True)
    torch.manual_seed(0)
    w, v = (torch.randn(96, 96, requires_grad=True) for _ in range(2))

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.matrix_exp((x @ w).relu() / 96) @ v.tanh()

    function = torch.compile(step, backend="pruner", options=options)
    square = torch.randn(96, 96)
    for _ in range(3):
        found = torch.autograd.grad(function(square).sum(), (w, v))
        wanted = torch.autograd.grad(step(square).sum(), (w, v))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert races
    report = torch_pruner.last_report()
    assert report is not None
    assert len(report.graphs) == 2, "forward and backward"
    assert max(graph.regions for graph in report.graphs) > 1


def test_quick_effort_ends_with_its_search(
    monkeypatch: pytest.MonkeyPatch, executor: Level, net: nn.Module, options: dict[str, Any]
) -> None:
    races = judged(monkeypatch, lambda n: True)
    called(net, {**options, "effort": "quick"})
    assert races == []


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(96, 64), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * self.gate(x).relu()


@pytest.fixture
def any_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recut, "ABOUT", math.inf)


def test_a_graph_is_cut_as_whole_calls_want_it(
    monkeypatch: pytest.MonkeyPatch, executor: Level, options: dict[str, Any], any_cut: None
) -> None:
    """Also by processes that come later, and from a bundle."""
    torch.manual_seed(0)
    net = Gated().eval()
    races = judged(monkeypatch, lambda n: n == 1)  # what is joined, and not once more in the end
    usual = digests(called(net, options))
    assert races
    assert {**options, "trials": 24} == options
    monkeypatch.setattr(network_finals, "wins", lambda *_: True)
    other = {**options, "cache_dir": options["cache_dir"] + "/other"}
    cut = digests(called(net, other))
    assert not set(usual) & set(cut), "none of the two products is left"
    measured = executor.n_measured
    served = called(net, {**other, "on_miss": "error"})
    assert digests(served) == cut
    assert executor.n_measured == measured
    bundle = f"{other['cache_dir']}.bundle"
    torch_pruner.save_bundle(bundle, cache_dir=other["cache_dir"])
    fresh = {**options, "cache_dir": options["cache_dir"] + "/fresh", "on_miss": "error"}
    torch_pruner.load_bundle(bundle, cache_dir=fresh["cache_dir"])
    assert digests(called(net, fresh)) == cut


def test_a_cut_that_goes_wrong_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, executor: Level, options: dict[str, Any], any_cut: None
) -> None:
    torch.manual_seed(0)
    net = Gated().eval()
    judged(monkeypatch, lambda n: True)
    compiled = recut.Recut.compiled

    def broken(self: Any, other: Any, choices: Any) -> Any:
        compiled(self, other, choices)
        raise exc.CompileError("gate", "no code")

    monkeypatch.setattr(recut.Recut, "compiled", broken)
    usual = digests(called(net, options))
    assert digests(called(net, {**options, "on_miss": "error"})) == usual
