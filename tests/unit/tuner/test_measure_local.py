"""LocalExecutor with a builder that needs no compiler: failures, isolation, processes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import fakes
from tests.contracts.measure_executor import MeasureExecutorContract
from torch_pruner import log
from torch_pruner.exc import MeasureError
from torch_pruner.pareto import TIE
from torch_pruner.task import MeasureInput, MeasureStatus
from torch_pruner.tuner.measure.base import EvaluatorSpec
from torch_pruner.tuner.measure.jobs import Limits
from torch_pruner.tuner.measure.local import LocalExecutor
from torch_pruner.tuner.measure.meter import MeterSource
from torch_pruner.tuner.measure.process import WorkerProcess

FAST = EvaluatorSpec(repeat=2, min_repeat_s=1e-4, flush_bytes=1 << 12)
LIMITS = Limits(start_s=60, task_s=20, build_s=0.7, run_s=0.7)
METERED = Limits(start_s=60, task_s=20, build_s=5, run_s=20)
S = MeasureStatus


def make_executor(**kwargs) -> LocalExecutor:
    kwargs = {"n_workers": 2, "limits": LIMITS, "builder": "tests.fakes:FakeBuilder", **kwargs}
    return LocalExecutor(1, FAST, **kwargs)


@pytest.fixture
def executor():
    with make_executor() as it:
        it.start()
        yield it


def measure(executor, *modes, task=None):
    task = task or fakes.make_task()
    return executor.measure(
        [MeasureInput(task, fakes.candidate(m, tag)) for tag, m in enumerate(modes)]
    )


class TestLocalExecutor(MeasureExecutorContract):
    @pytest.fixture
    def executor(self, executor):
        return executor

    @pytest.fixture
    def task(self):
        return fakes.make_task()

    @pytest.fixture
    def good(self):
        return [fakes.candidate(tag=i) for i in range(3)]

    @pytest.fixture
    def bad(self):
        return [
            (fakes.candidate(fakes.BUILD_RAISES), S.BUILD_ERROR),
            (fakes.candidate(fakes.UNPRINTABLE), S.BUILD_ERROR),
            (fakes.candidate(fakes.BUILD_CRASHES), S.BUILD_ERROR),
            (fakes.candidate(fakes.RUN_RAISES), S.RUN_ERROR),
            (fakes.candidate(fakes.RUN_CRASHES), S.RUN_ERROR),
            (fakes.candidate(fakes.EXITS), S.RUN_ERROR),
            (fakes.candidate(fakes.WRONG), S.WRONG_RESULT),
            (fakes.candidate(fakes.RUN_HANGS), S.TIMEOUT),
            (fakes.candidate(fakes.BUILD_HANGS), S.TIMEOUT),
        ]


def test_what_a_candidate_prints_does_not_reach_the_protocol(executor) -> None:
    results = measure(executor, fakes.JUNK, fakes.GOOD, fakes.JUNK)
    assert [r.status for r in results] == [S.OK] * 3


def test_candidates_lost_with_a_worker_are_measured_anyway(executor) -> None:
    modes = [fakes.GOOD, fakes.GOOD, fakes.RUN_CRASHES, fakes.GOOD, fakes.GOOD, fakes.BUILD_CRASHES]
    statuses = [r.status for r in measure(executor, *modes, fakes.GOOD, fakes.GOOD)]
    assert statuses == [S.OK, S.OK, S.RUN_ERROR, S.OK, S.OK, S.BUILD_ERROR, S.OK, S.OK]
    assert executor.n_measured == 8


@pytest.mark.parametrize(
    ("mode", "status"), [(fakes.CRASHES_LATER, S.RUN_ERROR), (fakes.HANGS_LATER, S.TIMEOUT)]
)
def test_one_that_fails_while_others_take_turns_is_found(executor, mode, status) -> None:
    modes = [fakes.GOOD, fakes.GOOD, mode, fakes.GOOD, fakes.GOOD, fakes.GOOD]
    statuses = [r.status for r in measure(executor, *modes)]
    assert statuses == [S.OK, S.OK, status, S.OK, S.OK, S.OK]


def test_two_tasks_in_one_batch(executor) -> None:
    tasks = [fakes.make_task(4), fakes.make_task(8)]
    inputs = [MeasureInput(t, fakes.candidate(tag=i)) for i in range(2) for t in tasks]
    assert [r.status for r in executor.measure(inputs)] == [S.OK] * 4


def test_a_crash_tells_what_the_worker_wrote_last(executor) -> None:
    (result,) = measure(executor, fakes.RUN_CRASHES)
    assert f"signal {signal.SIGSEGV}" in result.error


def test_where_no_worker_can_run_anything_none_is_blamed_and_none_started_again(executor) -> None:
    for _ in range(2):
        with pytest.raises(MeasureError, match="somebody else's"):
            measure(executor, fakes.GOOD, fakes.CANNOT_RUN, fakes.GOOD)
    assert not executor._workers


def test_a_users_file_named_like_a_standard_module_is_no_problem(monkeypatch, tmp_path) -> None:
    (tmp_path / "pickle.py").write_text("raise RuntimeError('not the module you want')")
    monkeypatch.syspath_prepend(tmp_path)
    with make_executor() as executor:
        assert [r.status for r in measure(executor, fakes.GOOD)] == [S.OK]


def test_finalists_are_metered_and_others_are_not() -> None:
    task, good = fakes.make_task(), [fakes.candidate(tag=k) for k in range(2)]
    inputs = [MeasureInput(task, c) for c in (*good, fakes.candidate(fakes.RUN_RAISES))]
    with make_executor(limits=METERED, meter=MeterSource("tests.fakes:FakeMeter")) as executor:
        assert [r.joules for r in executor.measure(inputs)] == [None] * 3
        raced = executor.race(inputs)
        fast, slow = sorted(raced[:2], key=lambda r: r.latency_s)
        assert fast.joules > 0  # what a call costs by a clock that is no machine's: test_meters.py
        assert (slow.joules is None) == (slow.latency_s > TIE * fast.latency_s)
        assert (raced[2].status, raced[2].joules) == (S.RUN_ERROR, None)


@pytest.mark.parametrize("fault", ["raises", "still", "absent", "dies"])
def test_a_meter_that_fails_costs_nobody_their_time(fault: str, caplog) -> None:
    log.forget_warnings()
    inputs = [MeasureInput(fakes.make_task(), fakes.candidate(tag=k)) for k in range(2)]
    meter = MeterSource("tests.fakes:FakeMeter", fault)
    with make_executor(limits=METERED, meter=meter) as executor:
        for _ in range(2):
            results = executor.race(inputs)
            assert all(r.status is S.OK and r.run_secs for r in results), results
            assert [r.joules for r in results] == [None, None]
    assert sum("cannot read a fake" in r.message for r in caplog.records) == (fault != "dies")


def test_phases_are_timed(executor) -> None:
    measure(executor, fakes.GOOD)
    assert set(executor.phase_seconds) == {"build", "measure"}
    assert min(executor.phase_seconds.values()) > 0


def test_workers_killed_between_calls_are_replaced(executor) -> None:
    measure(executor, fakes.GOOD)
    for worker in executor._workers:
        os.kill(worker.process.pid, signal.SIGKILL)
    assert [r.status for r in measure(executor, fakes.GOOD, fakes.GOOD)] == [S.OK] * 2


def test_a_worker_that_dies_before_it_gets_its_job_loses_nothing(executor, monkeypatch) -> None:
    measure(executor, fakes.GOOD)  # by one of two: the other has yet to hear of the task
    for worker in executor._workers:
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process._process.wait()
    with monkeypatch.context() as patch:  # as if they were killed a moment later
        patch.setattr(WorkerProcess, "alive", True)
        assert [r.status for r in measure(executor, fakes.GOOD, fakes.GOOD)] == [S.OK] * 2


def test_a_worker_that_cannot_start_is_an_exception_with_its_words() -> None:
    executor = make_executor(builder="tests.fakes:BrokenBuilder")
    with executor, pytest.raises(MeasureError, match="the compiler is not installed"):
        measure(executor, fakes.GOOD)


def test_a_closed_executor_says_so(executor) -> None:
    executor.close()
    with pytest.raises(MeasureError, match="closed"):
        measure(executor, fakes.GOOD)


def test_an_interrupt_leaves_the_executor_usable(executor, monkeypatch) -> None:
    measure(executor, fakes.GOOD)
    with monkeypatch.context() as patch:
        patch.setattr(executor, "_wait", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            measure(executor, fakes.GOOD, fakes.GOOD)
    assert [r.status for r in measure(executor, fakes.GOOD)] == [S.OK]


def test_no_process_survives_close_or_collection() -> None:
    executor = make_executor()
    measure(executor, fakes.GOOD)
    pids = [w.process.pid for w in executor._workers]
    del executor
    gc.collect()
    assert not [p for p in pids if Path(f"/proc/{p}").exists()]


def test_workers_end_when_their_parent_is_killed() -> None:
    script = """
import os, sys
from tests import fakes
from tests.unit.tuner.test_measure_local import make_executor, measure
executor = make_executor()
measure(executor, fakes.GOOD)
print(*[w.process.pid for w in executor._workers], flush=True)
os.kill(os.getpid(), 9)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=60
    )
    pids = [int(p) for p in done.stdout.split()]
    assert pids, done.stderr
    deadline = time.monotonic() + 10
    while any(_running(p) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [p for p in pids if _running(p)]


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
