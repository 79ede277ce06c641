"""Times of a task on one scale: the anchor is timed along, on every worker, and never changes."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from tests import fakes
from torch_pruner.task import MeasureInput, MeasureResult, MeasureStatus
from torch_pruner.tuner.measure.base import EvaluatorSpec
from torch_pruner.tuner.measure.jobs import MeasureBatch, WorkerState
from torch_pruner.tuner.measure.local import AGAIN, LocalExecutor
from torch_pruner.tuner.measure.pace import HAND_OVER, PACE, Anchors

TASK = fakes.make_task()
NAME = f"{TASK.workload}/{TASK.threads}"


def result(tag: int, seconds: float | None) -> MeasureResult:
    status = MeasureStatus.TIMEOUT if seconds is None else MeasureStatus.OK
    return MeasureResult(fakes.candidate(tag=tag), status, () if seconds is None else (seconds,))


def anchored(*seconds: float | None) -> Anchors:
    anchors = Anchors()
    anchors.choose("t", [result(i, s) for i, s in enumerate(seconds)])
    return anchors


def test_the_best_of_the_first_batch_is_the_anchor_and_stays() -> None:
    anchors = anchored(3.0, None, 2.0)
    first = anchors.of("t")
    assert first is not None
    assert first.job < 0
    assert first.candidate == fakes.candidate(tag=2)
    anchors.choose("t", [result(7, 1.0)])
    assert anchors.of("t") is first
    assert anchors.of("another") is None


def test_a_batch_of_failures_gives_no_anchor() -> None:
    anchors = anchored(None, None)
    assert anchors.of("t") is None
    anchors.choose("t", [result(3, 1.0)])
    assert anchors.of("t") is not None


def test_an_anchor_that_is_far_too_slow_hands_over() -> None:
    anchors = anchored(4.0)
    first = anchors.of("t")
    anchors.choose("t", [result(7, 4.0 / HAND_OVER * 0.9)])
    second = anchors.of("t")
    assert first is not None
    assert second is not None
    assert second.job != first.job
    assert second.candidate == fakes.candidate(tag=7)


def test_what_an_anchor_takes_longer_is_how_much_slower_the_machine_is() -> None:
    anchors = anchored(2.0)
    job = anchors.of("t").job
    assert anchors.slower(job, [3.0, 9.0, 2.5]) == 1.5
    assert anchors.slower(job, []) == 1.0
    assert anchors.slower(job - 1, [3.0]) == 1.0


def test_an_anchor_that_ends_workers_is_not_replaced() -> None:
    anchors = anchored(2.0)
    anchors.give_up(anchors.of("t").job)
    assert anchors.of("t") is None
    anchors.choose("t", [result(1, 1.0)])
    assert anchors.of("t") is None


def test_noise_does_not_add_up() -> None:
    """However often the best is found at slow moments, nobody seems faster than it is."""
    rng, anchors, errors = np.random.default_rng(0), Anchors(), []
    for tag in range(60):
        true, pace = 1.0 - tag / 100, float(rng.choice([1.0, 1.0, 1.5, 3.0]))
        anchor, slower = anchors.of("t"), 1.0
        if anchor is not None:
            its = 1.0 - dict(anchor.candidate.decisions)["tag"] / 100
            slower = anchors.slower(anchor.job, [its * pace * (1 + 0.2 * rng.random())])
        seconds = true * pace * (1 + 0.2 * rng.random()) / slower
        anchors.choose("t", [result(tag, seconds)])
        errors.append(seconds / true)
    later = np.log(errors[1:])
    assert np.abs(later - later.mean()).max() < 0.25  # one scale, and the noise of two readings


class Process:
    """A worker that only listens."""

    def __init__(self) -> None:
        self.sent: list[dict] = []
        self.pid = 0

    def send(self, message) -> None:
        self.sent.append(message)


@pytest.fixture
def machine():
    """An executor with a worker that knows the task, and an anchor of ten microseconds."""
    executor = LocalExecutor(1, EvaluatorSpec(), builder="tests.fakes:FakeBuilder")
    executor._anchors.choose(NAME, [result(9, 10e-6)])
    worker = WorkerState(Process(), ready=True, tasks={NAME})
    yield SimpleNamespace(executor=executor, worker=worker, anchor=executor._anchors.of(NAME))
    executor.close()


def batch_of(count: int, **more) -> MeasureBatch:
    inputs = [MeasureInput(TASK, fakes.candidate(tag=i)) for i in range(count)]
    return MeasureBatch(inputs, [NAME] * count, queue=deque(range(count)), **more)


def test_every_worker_builds_the_anchor_once(machine) -> None:
    batch = batch_of(3)
    machine.executor._feed(machine.worker, batch)
    built = [m["jobs"][0]["job"] for m in machine.worker.process.sent]
    assert built == [machine.anchor.job, 0]
    for _ in range(2):
        machine.executor._on_built(machine.worker, batch, {"ok": True})
    machine.executor._feed(machine.worker, batch)
    built = [m["jobs"][0]["job"] for m in machine.worker.process.sent]
    assert built == [machine.anchor.job, 0, 1, 2]
    assert machine.worker.built == [0]


def test_nobody_builds_an_anchor_for_a_race(machine) -> None:
    machine.executor._feed(machine.worker, batch_of(1, race=9))
    assert [m["jobs"][0]["job"] for m in machine.worker.process.sent] == [0]


def test_times_of_a_slow_moment_are_put_right(machine) -> None:
    batch, worker, job = batch_of(1), machine.worker, machine.anchor.job
    worker.anchors[job] = True
    machine.executor._start_group(worker, batch, [0])
    sent = worker.process.sent[-1]
    assert sent["jobs"] == [job, 0]
    assert sent["anchor"] == job
    for number in (job, 0):
        machine.executor._on_timed(worker, batch, {"job": number, "ok": True, "ran": True})
    for seconds in (14e-6, 9.8e-6):
        answer = {"ok": True, "run_secs": [seconds] * 3}
        machine.executor._on_timed(worker, batch, answer)
    assert batch.results[0].latency_s == pytest.approx(7e-6)


def test_what_an_anchor_lost_with_a_core_is_not_taken_off_a_kernel_of_one_thread(machine) -> None:
    """The anchor takes four times as long; a kernel of one thread seemed four times as fast."""
    batch, worker, job = batch_of(1), machine.worker, machine.anchor.job
    worker.anchors[job] = True
    machine.executor._start_group(worker, batch, [0])
    for number in (job, 0):
        machine.executor._on_timed(worker, batch, {"job": number, "ok": True, "ran": True})
    for seconds in (40e-6, 15e-6):
        machine.executor._on_timed(worker, batch, {"ok": True, "run_secs": [seconds] * 3})
    assert worker.slower == pytest.approx(4.0)
    assert batch.results[0].latency_s == pytest.approx(15e-6 / PACE)


class Moments:
    """Stands for timing: each time it is so many times slower, and all jobs but one work."""

    def __init__(self, *slower: float) -> None:
        self.slower, self.groups = list(slower), []

    def __call__(self, worker, batch, group) -> None:
        self.groups.append(list(group))
        worker.slower = self.slower.pop(0)
        for job in group:
            if job == 1:
                batch.settle(job, MeasureStatus.WRONG_RESULT, "wrong")
            else:
                batch.results[job] = result(job, 1e-6 * worker.slower)


def test_a_bad_moment_is_timed_again_and_what_it_said_forgotten(machine, monkeypatch) -> None:
    executor, batch, moments = machine.executor, batch_of(3), Moments(4.0, 1.2)
    executor._workers.append(machine.worker)
    monkeypatch.setattr(executor, "_time_once", moments)
    executor._time_group(machine.worker, batch, [0, 1, 2])
    executor._workers.clear()
    assert moments.groups == [[0, 1, 2], [0, 2]]
    assert batch.results[0].latency_s == pytest.approx(1.2e-6)
    assert executor._best[NAME] == pytest.approx(1.2e-6)


def test_where_it_stays_bad_nothing_is_timed_again_until_it_is_better(machine, monkeypatch) -> None:
    executor, batch = machine.executor, batch_of(1)
    executor._workers.append(machine.worker)
    moments = Moments(*[4.0] * (2 * (1 + AGAIN) + 1), 1.0, 4.0, 1.0)
    monkeypatch.setattr(executor, "_time_once", moments)
    counts = []
    for _ in range(5):
        before = len(moments.groups)
        executor._time_group(machine.worker, batch, [0])
        counts.append(len(moments.groups) - before)
    executor._workers.clear()
    assert counts == [1 + AGAIN, 1 + AGAIN, 1, 1, 2]


@pytest.mark.parametrize(("race", "lost", "built"), [(9, 0, True), (0, 1, True), (0, 0, False)])
def test_races_suspects_and_workers_without_it_go_without_the_anchor(
    machine, race, lost, built
) -> None:
    batch = batch_of(1, race=race)
    batch.lost[0] = lost
    machine.worker.anchors[machine.anchor.job] = built
    machine.executor._start_group(machine.worker, batch, [0])
    sent = machine.worker.process.sent[-1]
    assert sent["jobs"] == [0]
    assert sent["anchor"] is None
    machine.executor._on_timed(machine.worker, batch, {"ok": True, "run_secs": [3e-6]})
    assert batch.results[0].latency_s == 3e-6


def test_a_single_candidate_that_ends_a_worker_beside_its_anchor_is_to_blame(machine) -> None:
    batch, worker, job = batch_of(2), machine.worker, machine.anchor.job
    worker.anchors[job] = True
    machine.executor._start_group(worker, batch, [0])
    for number in (job, 0):
        machine.executor._on_timed(worker, batch, {"job": number, "ok": True, "ran": True})
    machine.executor._blame(worker, batch, MeasureStatus.TIMEOUT, "hangs")
    assert batch.results[0].status is MeasureStatus.TIMEOUT
    assert machine.executor._anchors.of(NAME) is not None


def test_an_anchor_that_ends_a_worker_is_given_up(machine) -> None:
    batch, worker, job = batch_of(2), machine.worker, machine.anchor.job
    worker.anchors[job] = True
    machine.executor._start_group(worker, batch, [0, 1])
    machine.executor._blame(worker, batch, MeasureStatus.TIMEOUT, "hangs")
    assert not batch.results
    assert machine.executor._anchors.of(NAME) is None
