"""What every measurement executor promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torch_pruner.task import Candidate, MeasureInput, MeasureStatus, Task

if TYPE_CHECKING:
    from torch_pruner.tuner.measure.base import MeasureExecutor


class MeasureExecutorContract:
    """Subclasses give fixtures ``executor``, ``task``, ``good`` (>= 3 candidates) and ``bad``.

    ``bad`` holds pairs of a candidate and the status it must get.
    """

    @pytest.fixture
    def executor(self) -> MeasureExecutor:
        raise NotImplementedError

    @pytest.fixture
    def task(self) -> Task:
        raise NotImplementedError

    @pytest.fixture
    def good(self) -> list[Candidate]:
        raise NotImplementedError

    @pytest.fixture
    def bad(self) -> list[tuple[Candidate, MeasureStatus]]:
        raise NotImplementedError

    def test_results_in_input_order(self, executor, task, good) -> None:
        order = [good[2], good[0], good[1], good[0]]
        results = executor.measure([MeasureInput(task, c) for c in order])
        assert [r.candidate for r in results] == order
        assert all(r.status is MeasureStatus.OK for r in results), [r.error for r in results]
        assert all(r.run_secs and min(r.run_secs) > 0 for r in results)

    def test_a_race_times_everyone(self, executor, task, good, bad) -> None:
        entered = [good[1], bad[0][0], good[0]]
        results = executor.race([MeasureInput(task, c) for c in entered])
        assert [r.candidate for r in results] == entered
        assert results[1].status is bad[0][1], results[1].error
        assert all(r.status is MeasureStatus.OK and r.run_secs for r in (results[0], results[2]))

    def test_nothing_to_measure(self, executor) -> None:
        assert executor.measure([]) == []

    def test_a_bad_candidate_is_a_result_and_the_next_works(
        self, executor, task, good, bad
    ) -> None:
        for candidate, status in bad:
            first, after = executor.measure(
                [MeasureInput(task, candidate), MeasureInput(task, good[0])]
            )
            assert first.status is status, first.error
            assert first.error
            assert not first.run_secs
            assert after.status is MeasureStatus.OK, after.error
            (again,) = executor.measure([MeasureInput(task, good[1])])
            assert again.status is MeasureStatus.OK, again.error

    def test_close_twice(self, executor) -> None:
        executor.close()
        executor.close()
