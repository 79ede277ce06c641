"""What every meter of energy promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torch_pruner.exc import MeterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.tuner.measure.meter import Meter


class MeterContract:
    """Subclasses give fixtures ``meter``; ``use``, which lets the device use so many joules; and
    ``fail``, after which a reading cannot be had until what it returns is called."""

    @pytest.fixture
    def meter(self) -> Meter:
        raise NotImplementedError

    @pytest.fixture
    def use(self) -> Callable[[float], None]:
        raise NotImplementedError

    @pytest.fixture
    def fail(self) -> Callable[[], Callable[[], None]]:
        raise NotImplementedError

    def test_it_says_what_it_is(self, meter) -> None:
        assert meter.name
        assert meter.period_s >= 0

    def test_it_counts_joules(self, meter, use) -> None:
        before = meter.joules()
        use(2.5)
        assert meter.joules() - before == pytest.approx(2.5, abs=2e-3)
        assert meter.joules() - before == pytest.approx(2.5, abs=2e-3), "nothing ran"

    def test_it_goes_on_where_the_hardware_begins_anew(self, meter, use) -> None:
        before = last = meter.joules()
        for _ in range(50):
            use(7.0)
            now = meter.joules()
            assert now > last
            last = now
        assert last - before == pytest.approx(350.0, abs=0.1)

    def test_what_cannot_be_read_is_an_error_of_its_own_and_no_end(self, meter, use, fail) -> None:
        before, mend = meter.joules(), fail()
        with pytest.raises(MeterError) as raised:
            meter.joules()
        assert raised.value.meter == meter.name
        mend()
        use(1.0)
        assert meter.joules() - before == pytest.approx(1.0, abs=2e-3)
