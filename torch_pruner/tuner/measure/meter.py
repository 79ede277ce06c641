"""The meter seam: joules that a device has used, and what a call of a kernel adds to them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch_pruner.exc import MeterError

if TYPE_CHECKING:
    from collections.abc import Callable

LEAST_S = 0.3  # of a run: what happens at its ends, and what wakes up meanwhile, is small beside it
PERIODS = 20  # of the meter's in a run: its first and last reading are off by one at most
LONGEST = 4  # times the run that it should be, for a counter that did not move


class Meter(ABC):
    """Counts the energy of one device, of everything that runs there.

    Contract: ``joules`` never decreases and does not begin anew, whatever the hardware's counter
    does, if it is read once a minute; a reading that cannot be had raises ``MeterError``, and the
    next one may be had again. Making one raises ``MeterError`` where there is none that this
    process can read, with what is missing. Tests: ``tests/contracts/meter.py``.

    Example:
        meter = RaplMeter()
        before = meter.joules()
        run()
        print(meter.joules() - before, "J")
    """

    name: ClassVar[str]
    period_s: ClassVar[float]
    """Seconds after which the counter has moved: readings in between are the one before."""

    @abstractmethod
    def joules(self) -> float:
        """Energy used since some moment that stays the same."""


@dataclass(frozen=True, slots=True)
class MeterSource:
    """Where a process finds its meter: ``factory`` is "module:name", called with ``argument``."""

    factory: str
    argument: str = ""

    def open(self) -> Meter:
        """The meter. Raises ``MeterError``."""
        module, _, name = self.factory.partition(":")
        meter: Meter = getattr(importlib.import_module(module), name)(self.argument)
        return meter

    def to_json(self) -> dict[str, Any]:
        return {"factory": self.factory, "argument": self.argument}


RAPL = MeterSource("torch_pruner.tuner.measure.rapl:RaplMeter")
"""Of the CPUs of this machine."""


def nvml(device: str) -> MeterSource:
    """Of a GPU of this machine: its number, or its UUID (``GPU-...``)."""
    return MeterSource("torch_pruner.tuner.measure.nvml:NvmlMeter", device)


def run_s(meter: Meter) -> float:
    """Seconds that a run lasts at least, so that the meter's resolution does not count."""
    return max(LEAST_S, PERIODS * meter.period_s)


def joules_per_call(
    run: Callable[[int], object], meter: Meter, clock: Callable[[], float]
) -> float:
    """Joules of one of the calls that ``run`` makes, as many as it is told, one after another.

    It is what the device uses as a whole, at rest too: what a longer call costs. Raises
    ``MeterError`` where the counter does not move, and what ``run`` raises.
    """
    least_s = run_s(meter)
    number = _calibrated(run, clock, least_s)
    made, before, begin = 0, meter.joules(), clock()
    while True:
        run(number)
        made += number
        seconds = clock() - begin
        if seconds < least_s:
            continue
        used = meter.joules() - before
        if used > 0:
            return used / made
        if used < 0 or seconds > LONGEST * least_s:
            raise MeterError(meter.name, f"it counted {used:g} J in {seconds:.3g} s")


def _calibrated(run: Callable[[int], object], clock: Callable[[], float], least_s: float) -> int:
    """Calls that take about a tenth of ``least_s``: between them nobody looks at the clock."""
    number = 1
    while True:
        begin = clock()
        run(number)
        seconds = clock() - begin
        if seconds >= 0.1 * least_s or number >= 1 << 20:
            return number
        number *= 2
