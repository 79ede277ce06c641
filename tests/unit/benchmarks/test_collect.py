"""Collecting records: nothing is measured twice, and the best of a task are timed anew."""

from __future__ import annotations

import pytest

from benchmarks import collect, records
from tests import fakes
from torch_pruner.target import TargetSpec
from torch_pruner.task import MeasureInput, MeasureResult, MeasureStatus, Task

TASK = Task("linear", fakes.linear_spec(64, 128, 96), TargetSpec.detect(), 2)


class Executor(fakes.FakeExecutor):
    """Times by the order of arrival; whoever comes again is twice as slow."""

    def __init__(self) -> None:
        super().__init__(self._one)
        self.asked: list[MeasureInput] = []
        self.again: list[MeasureInput] = []

    def _one(self, asked: MeasureInput) -> MeasureResult:
        list_ = self.again if asked in self.asked else self.asked
        list_.append(asked)
        seconds = 1e-6 * len(self.asked) * (2 if list_ is self.again else 1)
        repeats = (seconds,) * self.evaluator.repeat
        return MeasureResult(asked.candidate, MeasureStatus.OK, repeats)


@pytest.fixture
def options(tmp_path):
    path = str(tmp_path / "records.jsonl")
    asked = ["--out", path, "--random", "20", "--drafted", "20", "--finalists", "5"]
    return collect._parse(asked), tmp_path / "records.jsonl"


def test_the_best_are_timed_again_once_and_nothing_is_measured_again(options) -> None:
    settings, path = options
    executor = Executor()
    count = collect.collect(TASK, settings, executor, path)
    assert count == len(executor.asked) >= 40
    assert executor.again == executor.asked[:5]
    (found,), damaged = records.read([path])
    assert not damaged
    anew = [r for r in found.results if len(r.run_secs) > collect.REPEATS]
    assert {r.candidate for r in anew} == {i.candidate for i in executor.again}
    assert collect.collect(TASK, settings, executor, path) == 0
    assert len(executor.asked) == count
    assert len(executor.again) == 5


def test_a_task_that_was_interrupted_is_measured_anew(options) -> None:
    settings, path = options
    first = Executor()
    some = collect.candidates(TASK, settings)[:10]
    results = first.measure([MeasureInput(TASK, c) for c in some])
    records.append(path, [records.task_line(TASK, first.device)])
    records.append(path, [records.result_line(TASK, first.device, r) for r in results])
    second = Executor()
    collect.collect(TASK, settings, second, path)
    assert {i.candidate for i in second.asked} >= set(some)
    assert len(second.again) == 5


def test_a_task_without_its_finals_is_measured_anew(options) -> None:
    """The next process has another scale: its finals would not compare with these times."""
    settings, path = options
    first = Executor()
    settings.finalists = 0
    count = collect.collect(TASK, settings, first, path)
    settings.finalists = 5
    second = Executor()
    assert collect.collect(TASK, settings, second, path) == count
    assert len(second.asked) == count
    assert len(second.again) == 5


def test_failures_are_no_finalists() -> None:
    bad = MeasureResult(fakes.candidate(tag=1), MeasureStatus.TIMEOUT)
    good = MeasureResult(fakes.candidate(tag=2), MeasureStatus.OK, (1.0,))
    assert collect.finalists([bad, good], 5) == [good.candidate]
    assert collect.finalists([bad], 5) == []
    assert collect.finalists([bad, good], 0) == []
