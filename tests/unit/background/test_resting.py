"""Searches rest while the process that they are for is at work. Clocks are told the time."""

from __future__ import annotations

import os

import pytest

from tests import fakes
from tests.contracts.measure_executor import MeasureExecutorContract
from torch_pruner.background.resting import LOOK_S, LOOKS, REST, RestingExecutor, cpu_seconds
from torch_pruner.task import MeasureInput, MeasureResult
from torch_pruner.task import MeasureStatus as S

BATCH_S = 2.0


class World:
    """A clock, and a process that uses so much of a core until it ends its work."""

    def __init__(self, share: float | None, until: float = 1e9) -> None:
        self.now, self.share, self.until, self.slept = 100.0, share, until, 0.0

    def used(self) -> float | None:
        return None if self.share is None else self.share * min(self.now, self.until)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


def result(given: MeasureInput) -> MeasureResult:
    if dict(given.candidate.decisions)["mode"] != fakes.GOOD:
        return MeasureResult(given.candidate, S.WRONG_RESULT, error="wrong")
    return MeasureResult(given.candidate, S.OK, (1e-6,))


def resting(world: World, inner: fakes.FakeExecutor) -> RestingExecutor:
    return RestingExecutor(inner, world.used, world.sleep, lambda: world.now)


def batches(world: World) -> fakes.FakeExecutor:
    def one(given: MeasureInput) -> MeasureResult:
        world.now += BATCH_S
        return result(given)

    return fakes.FakeExecutor(one)


def batch() -> list[MeasureInput]:
    return [MeasureInput(fakes.make_task(), fakes.candidate())]


class TestRestingExecutor(MeasureExecutorContract):
    @pytest.fixture
    def executor(self):
        return resting(World(1.0), fakes.FakeExecutor(result))

    @pytest.fixture
    def task(self):
        return fakes.make_task()

    @pytest.fixture
    def good(self):
        return [fakes.candidate(tag=i) for i in range(3)]

    @pytest.fixture
    def bad(self):
        return [(fakes.candidate(fakes.WRONG), S.WRONG_RESULT)]


@pytest.mark.parametrize("way", ["measure", "race"])
def test_after_a_batch_it_rests_longer_than_it_worked(way: str) -> None:
    world = World(0.5)
    executor = resting(world, batches(world))
    getattr(executor, way)(batch())
    assert world.slept == pytest.approx(REST * BATCH_S, abs=LOOK_S)


def test_what_is_between_batches_is_work_as_well() -> None:
    world = World(0.5)
    executor = resting(world, batches(world))
    world.now += 1.0
    executor.measure(batch())
    assert world.slept == pytest.approx(REST * (BATCH_S + 1.0), abs=LOOK_S)


@pytest.mark.parametrize("share", [0.0, 0.01, None], ids=["idle", "hardly", "unknown"])
def test_it_does_not_rest_for_nobody(share: float | None) -> None:
    world = World(share)
    resting(world, batches(world)).measure(batch())
    assert world.slept == 0.0


def test_it_goes_on_when_the_requests_end() -> None:
    world = World(0.5, until=100.0 + BATCH_S + 1.0)
    resting(world, batches(world)).measure(batch())
    assert world.slept == pytest.approx(1.0 + LOOKS * LOOK_S, abs=LOOK_S)


def test_it_is_ready_when_the_time_is_over() -> None:
    world = World(0.5)
    executor = resting(world, batches(world))
    with executor.within(BATCH_S + 1.0):
        executor.measure(batch())
    assert world.slept == pytest.approx(1.0, abs=LOOK_S)


def test_closing_closes_what_it_has() -> None:
    inner = fakes.FakeExecutor(result)
    resting(World(1.0), inner).close()
    assert inner.n_closed == 1


def test_a_process_has_used_processor_time() -> None:
    used = cpu_seconds(os.getpid())
    assert used is not None
    assert used > 0.0
    assert cpu_seconds(2**22 + 1) is None
