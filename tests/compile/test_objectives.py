"""``objective``, from the option to the program that runs."""

from __future__ import annotations

import pytest
import torch

import torch_pruner
from tests.fakes import FakeExecutor
from torch_pruner import exc
from torch_pruner.cache import KernelEntry, KernelStore
from torch_pruner.config import Config
from torch_pruner.devices import metering
from torch_pruner.devices.cpu import CpuDevice
from torch_pruner.families.footprint import footprint_of
from torch_pruner.task import MeasureResult, MeasureStatus
from torch_pruner.tuner.measure.meter import MeterSource

ROWS, DEPTH, COLUMNS = 64, 128, 40


class NearEqual(FakeExecutor):
    """The more a schedule packs the faster it is, by two percent at most.

    The draft is slower, and what packs nothing, too.
    """

    def __init__(self) -> None:
        super().__init__(self.one)
        self.first = None

    def one(self, given) -> MeasureResult:
        self.first = self.first or given.candidate
        packed = footprint_of(given.task.spec, given.candidate).packed_bytes
        seconds = 1e-4 * (1.02 - 0.02 * min(1.0, packed / (DEPTH * 64 * 4)))
        factor = 1.5 if given.candidate == self.first or not packed else 1.0
        return MeasureResult(given.candidate, MeasureStatus.OK, (seconds * factor,))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(DEPTH, COLUMNS, bias=False).eval()


@pytest.fixture
def options(tmp_path):
    return {"cache_dir": str(tmp_path), "library": False, "strict": True, "trials": 24}


def tuned(model, options, **more):
    torch.compiler.reset()
    return torch_pruner.tune(model, (torch.randn(ROWS, DEPTH),), {**options, **more})


def test_of_two_that_are_as_fast_the_smaller_runs(monkeypatch, model, options) -> None:
    by = NearEqual()
    monkeypatch.setattr(CpuDevice, "executor", lambda self, config, threads: by)
    small = tuned(model, options, objective="memory")
    large = tuned(model, options)
    count = by.n_measured
    assert 0 < small.weight_bytes < large.weight_bytes
    (a,), (b,) = small.tasks, large.tasks
    assert b.latency_after_s < a.latency_after_s <= 1.03 * b.latency_after_s
    assert (a.source, b.source) == ("tuned", "cache")
    again = tuned(model, options, objective="memory")
    assert (again.weight_bytes, again.sources["cache"]) == (small.weight_bytes, 1)
    assert by.n_measured == count, "one search serves both"
    x = torch.randn(ROWS, DEPTH)
    torch.compiler.reset()
    served = {**options, "objective": "memory", "on_miss": "error"}
    with torch.no_grad():
        y = torch.compile(model, backend="pruner", options=served)(x)
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)


def test_untuned_kernels_are_drafted_for_it(model, options) -> None:
    drafted = {**options, "effort": "none"}
    del drafted["trials"]
    latency, memory = tuned(model, drafted), tuned(model, drafted, objective="memory")
    held = [r.weight_bytes + r.workspace_bytes for r in (memory, latency)]
    assert held[0] <= held[1]
    assert memory.ops_compiled == latency.ops_compiled == memory.ops_total


def test_energy_without_a_meter_is_refused_before_anything_is_compiled(
    monkeypatch, model, options
) -> None:
    absent = MeterSource("tests.fakes:FakeMeter", "absent")
    monkeypatch.setattr(CpuDevice, "meter", lambda self: absent)
    for given in ({}, {"compile": "background"}, {"strict": False}):
        with pytest.raises(
            exc.OptionError, match=r"objective.*nobody has made one; wait; .*memory"
        ):
            tuned(model, options, objective="energy", **given)
    monkeypatch.setattr(CpuDevice, "meter", lambda self: None)
    with pytest.raises(exc.OptionError, match="needs a meter, and cpu has none"):
        tuned(model, options, objective="energy")
    with pytest.raises(exc.OptionError, match="effort='none' measures nothing"):
        tuned(model, options, objective="energy", effort="none")
    with pytest.raises(exc.OptionError, match="has none"):
        torch_pruner.tune_seen({**options, "objective": "energy"})


def test_devices_without_a_meter_are_named() -> None:
    fleet = Config(objective="energy", executor="rpc", tracker="localhost:9190/none")
    with pytest.raises(exc.OptionError, match="executor='rpc' has none"):
        metering.expect((torch.empty(0),), fleet)
    with pytest.raises(exc.OptionError, match="meta has none"):
        metering.expect((torch.empty(0), torch.empty(0, device="meta")), Config(objective="energy"))
    metering.expect((torch.empty(0, device="meta"),), Config(objective="memory"))


def test_what_nobody_may_tune_needs_no_meter(monkeypatch, model, options) -> None:
    monkeypatch.setattr(CpuDevice, "meter", lambda self: None)
    with pytest.raises(exc.CacheMiss):
        tuned(model, options, objective="energy", on_miss="error")
    report = tuned(model, options, objective="energy", on_miss="fallback")
    assert report.sources["untuned"] == 1


def test_energy_of_finalists_is_counted_and_kept(monkeypatch, model, options) -> None:
    source = MeterSource("tests.fakes:FakeMeter")
    monkeypatch.setattr(CpuDevice, "meter", lambda self: source)
    report = tuned(model, {**options, "trials": 6}, objective="energy")
    assert report.sources["tuned"] == 1
    listed = KernelStore.open(options["cache_dir"]).ls()
    (entry,) = (i.entry for i in listed if isinstance(i.entry, KernelEntry))
    fastest = entry.finalists[0]
    near = [f for f in entry.finalists if f.latency_s <= 1.03 * fastest.latency_s]
    assert all(f.joules for f in near) or len(near) == 1
    again = tuned(model, {**options, "trials": 6}, objective="energy")
    assert again.sources["cache"] == 1
