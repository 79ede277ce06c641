"""Meters with invented hardware, and the joules of a call with invented meters."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tests import fakes
from tests.contracts.meter import MeterContract
from torch_pruner.exc import MeterError
from torch_pruner.tuner.measure import rapl
from torch_pruner.tuner.measure.meter import LEAST_S, Meter, MeterSource, joules_per_call, nvml
from torch_pruner.tuner.measure.nvml import NvmlMeter
from torch_pruner.tuner.measure.rapl import RaplMeter

if TYPE_CHECKING:
    from pathlib import Path

RANGE_UJ = 60_000_000  # it comes round every few readings of the contract


class Powercap:
    """A folder as Linux's, with two packages and their parts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.used_uj = [RANGE_UJ - 1_000_000, 5]
        for k in range(2):
            self._domain(f"intel-rapl:{k}", f"package-{k}")
            self._domain(f"intel-rapl:{k}:0", "core")
        self._domain("intel-rapl:2", "psys")
        self._domain("intel-rapl-mmio:0", "package-0")
        (root / "dtpm").mkdir()
        self.use(0.0)

    def _domain(self, folder: str, name: str) -> None:
        path = self.root / folder
        path.mkdir(parents=True)
        (path / "name").write_text(f"{name}\n")
        (path / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
        (path / "energy_uj").write_text("123456\n")

    def counter(self, k: int) -> Path:
        return self.root / f"intel-rapl:{k}" / "energy_uj"

    def use(self, joules: float) -> None:
        for k in range(2):
            self.used_uj[k] += round(joules * 1e6 / 2)
            self.counter(k).write_text(f"{self.used_uj[k] % RANGE_UJ}\n")


@pytest.fixture
def powercap(tmp_path):
    return Powercap(tmp_path / "powercap")


class TestRapl(MeterContract):
    @pytest.fixture
    def meter(self, powercap):
        return RaplMeter(str(powercap.root))

    @pytest.fixture
    def use(self, powercap):
        return powercap.use

    @pytest.fixture(params=["no number", ""])
    def fail(self, powercap, request):
        def broken():
            before = powercap.counter(1).read_text()
            powercap.counter(1).write_text(request.param)
            return lambda: powercap.counter(1).write_text(before)

        return broken


class Nvml(ModuleType):
    """The calls of the library that are made, for one card."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.millijoules, self.broken, self.asked = 10_000.0, "", None

    def nvmlInit(self) -> None:
        self._check("init")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self.asked = index
        return "card"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked = uuid
        return "card"

    def nvmlDeviceGetTotalEnergyConsumption(self, card: str) -> int:
        assert card == "card"
        self._check("energy")
        return round(self.millijoules)

    def _check(self, call: str) -> None:
        if self.broken == call:
            raise self.NVMLError("Not Supported")


@pytest.fixture
def library(monkeypatch):
    made = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


class TestNvml(MeterContract):
    @pytest.fixture
    def meter(self, library):
        return NvmlMeter("GPU-12ab")

    @pytest.fixture
    def use(self, library):
        def used(joules):
            library.millijoules += 1e3 * joules

        return used

    @pytest.fixture
    def fail(self, library):
        def broken():
            library.broken = "energy"
            return lambda: setattr(library, "broken", "")

        return broken


def test_a_card_by_number_or_by_uuid(library) -> None:
    nvml("3").open()
    assert library.asked == 3
    nvml("GPU-12ab").open()
    assert library.asked == "GPU-12ab"


@pytest.mark.parametrize("broken", ["init", "energy"])
def test_a_card_that_tells_nothing(library, broken: str) -> None:
    library.broken = broken
    with pytest.raises(MeterError, match="Not Supported"):
        NvmlMeter()


def test_without_the_library_of_nvidia(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MeterError, match="pip install nvidia-ml-py"):
        NvmlMeter()


def test_without_rapl(tmp_path) -> None:
    with pytest.raises(MeterError, match=r"no .*powercap"):
        RaplMeter(str(tmp_path / "powercap"))
    (tmp_path / "powercap" / "intel-rapl").mkdir(parents=True)
    with pytest.raises(MeterError, match="no package"):
        RaplMeter(str(tmp_path / "powercap"))


def test_a_counter_that_others_may_not_read(powercap, monkeypatch) -> None:
    def refused(path, **_):
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return "package-0\n" if path.name == "name" else str(RANGE_UJ)

    monkeypatch.setattr(rapl.Path, "read_text", refused)
    with pytest.raises(MeterError, match=r"Permission denied.*chmod a\+r .*energy_uj"):
        RaplMeter(str(powercap.root))


class Bench:
    """A clock and a meter that calls move: each takes ``seconds`` and uses ``joules``."""

    name, period_s = "bench", 0.0

    def __init__(self, seconds: float, joules: float, *, fails_at: int = -1) -> None:
        self.now, self.used, self.calls, self.readings = 0.0, 1e6, 0, 0
        self._seconds, self._joules, self._fails_at = seconds, joules, fails_at

    def run(self, number: int) -> None:
        self.calls += number
        self.now += number * self._seconds
        self.used += number * self._joules

    def clock(self) -> float:
        return self.now

    def joules(self) -> float:
        self.readings += 1
        if self.readings == self._fails_at:
            raise MeterError(self.name, "gone")
        return self.used


@pytest.mark.parametrize("seconds", [1e-6, 1e-3, 1.0])
def test_the_joules_of_a_call(seconds: float) -> None:
    bench = Bench(seconds, 0.25)
    found = joules_per_call(bench.run, bench, bench.clock)
    assert found == pytest.approx(0.25, rel=1e-6)
    assert LEAST_S <= bench.now <= 2 * LEAST_S + 2 * seconds
    assert bench.readings == 2, "reading is work, too"


def test_a_run_lasts_many_periods_of_its_meter() -> None:
    bench = Bench(1e-3, 0.25)
    bench.period_s = 0.1
    joules_per_call(bench.run, bench, bench.clock)
    assert 2.0 <= bench.now <= 3.0


@pytest.mark.parametrize("joules", [0.0, -0.5])
def test_a_counter_that_stands_still_or_goes_back(joules: float) -> None:
    bench = Bench(1e-3, joules)
    with pytest.raises(MeterError, match="it counted"):
        joules_per_call(bench.run, bench, bench.clock)
    assert bench.now < 10 * LEAST_S


@pytest.mark.parametrize("reading", [1, 2])
def test_a_reading_that_fails(reading: int) -> None:
    bench = Bench(1e-3, 0.25, fails_at=reading)
    with pytest.raises(MeterError, match="gone"):
        joules_per_call(bench.run, bench, bench.clock)


def test_a_source_names_what_another_process_can_make() -> None:
    source = MeterSource("tests.fakes:FakeMeter", "steady")
    assert MeterSource(**source.to_json()) == source
    meter = source.open()
    assert isinstance(meter, Meter)
    assert isinstance(meter, fakes.FakeMeter)
