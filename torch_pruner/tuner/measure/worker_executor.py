"""Executors whose candidates are built and timed by long-lived worker processes.

In: how many workers there are to be. Out: workers, and what became of the candidates of one that
died, hung or ran over its limit: one of them may be to blame, the others are queued again. What the
workers are asked to do, and when, is the subclass's business.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing.connection
import os
import signal
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, NoReturn

from torch_pruner.exc import MeasureError, WorkerDied
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.log import PhaseTimer, logger
from torch_pruner.task import MeasureStatus
from torch_pruner.tuner.measure.base import EvaluatorSpec, MeasureExecutor
from torch_pruner.tuner.measure.jobs import Limits, MeasureBatch, WorkerState
from torch_pruner.tuner.measure.pace import Anchors
from torch_pruner.tuner.measure.process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_pruner.tuner.measure.meter import MeterSource
    from torch_pruner.tuner.measure.protocol import Message

log = logger(__name__)

TVM_BUILDER = "torch_pruner.tuner.measure._tvm:TvmBuilder"
MAX_LOST = 3  # times that a job's worker may die without a culprit
MAX_STARTS = 3  # in a row without an answer, before the executor gives up
UNUSABLE = 72  # exit status of a worker that finds that none can run anything here


class OutOfTimeError(Exception):
    """The time of ``within`` is over."""


class WorkerExecutor(MeasureExecutor):
    """The worker processes of an executor; ``measure`` and ``race`` are a subclass's."""

    def __init__(
        self,
        threads: int,
        evaluator: EvaluatorSpec | None = None,
        *,
        n_workers: int | None = None,
        limits: Limits | None = None,
        seed: int = 0,
        builder: str = TVM_BUILDER,
        device: DeviceFingerprint | None = None,
        environment: Mapping[str, str] | None = None,
        meter: MeterSource | None = None,
    ) -> None:
        """``meter``: what counts the joules of finalists; None: nobody does."""
        self.threads = threads
        self.evaluator = evaluator or EvaluatorSpec()
        self.device = device or DeviceFingerprint.detect()
        self._environment = dict(environment or {})
        self._meter = meter
        self.limits = limits or Limits()
        self.seed = seed
        self._timer = PhaseTimer()
        self.n_measured = 0
        self._builder = builder
        self._n_workers = n_workers or min(2, os.cpu_count() or 1)
        self._workers: list[WorkerState] = []
        self._best: dict[str, float] = {}
        self._anchors = Anchors()
        self._shaken = 0  # groups in a row of which the last timing was in a bad moment, too
        self._failed_starts = 0
        self._unusable = ""  # why no worker can run anything
        self._lock = threading.Lock()
        self._closed = False
        self._deadline = math.inf
        self._finalizer = weakref.finalize(self, kill_all, self._workers)

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        return {name: self._timer.seconds[name] for name in ("build", "measure")}

    def start(self) -> None:
        with self._lock:
            self._reap()
            self._respawn()

    def close(self) -> None:
        self._closed = True
        kill_all(self._workers)

    @contextlib.contextmanager
    def within(self, seconds: float | None) -> Iterator[None]:
        self._deadline = math.inf if seconds is None else time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = math.inf

    # Workers

    def _reap(self) -> None:
        for worker in [w for w in self._workers if not w.process.alive]:
            self._discard(worker)

    def _respawn(self) -> None:
        if self._closed:
            raise MeasureError("the measurement executor is closed; create a new one")
        if self._unusable:
            raise MeasureError(self._unusable)
        count = str(self.threads)
        environment = {
            "TVM_NUM_THREADS": count,
            "TVM_BIND_THREADS": "0",
            "OMP_NUM_THREADS": count,
            "OPENBLAS_NUM_THREADS": count,
            **self._environment,
        }
        while len(self._workers) < self._n_workers:
            process = WorkerProcess(self._arguments(), environment)
            self._workers.append(WorkerState(process, since=time.monotonic()))

    def _arguments(self) -> list[str]:
        """The arguments of a worker's process."""
        return ["--builder", self._builder]

    def _discard(self, worker: WorkerState) -> str:
        """End a worker; returns what it said last."""
        self._workers.remove(worker)
        worker.process.kill()
        words = worker.process.last_words()
        worker.process.forget()
        if not worker.ready:
            self._did_not_start(words)
        return words

    def _did_not_start(self, words: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_STARTS:
            self._give_up(
                f"{MAX_STARTS} measurement workers in a row did not start;"
                f" run `torch-pruner doctor`. The last one said: {words or 'nothing'}"
            )

    def _give_up(self, why: str) -> NoReturn:
        """Say so now and whenever something is to be measured: starting others takes seconds."""
        self._unusable = why
        raise MeasureError(why)

    def _died(
        self, worker: WorkerState, batch: MeasureBatch, status: MeasureStatus, err: WorkerDied
    ) -> None:
        if err.exitcode == UNUSABLE:
            self._give_up(f"no measurement worker can run kernels: {self._discard(worker)}")
        self._lose(worker, batch, status, str(err), blame=self._blames(err))

    def _blames(self, err: WorkerDied) -> bool:
        """Whether the candidate that a worker was busy with may have ended it."""
        # Candidates do not kill with SIGKILL: the system (memory) or an operator did.
        return err.exitcode != -signal.SIGKILL

    def _lose(
        self,
        worker: WorkerState,
        batch: MeasureBatch,
        status: MeasureStatus,
        why: str,
        *,
        blame: bool = True,
    ) -> None:
        """Settle the job that a dead or stuck worker was busy with; queue again its others."""
        words = self._discard(worker)
        error = f"{why}\n{words}" if words else why
        if worker.ready and worker.owes and blame:
            self._blame(worker, batch, status, error)
        for job in dict.fromkeys((*worker.built, *(o for o in worker.owes if isinstance(o, int)))):
            if job in batch.results or job < 0:
                continue
            batch.lost[job] += 1
            if batch.lost[job] >= MAX_LOST:  # it may be the one that kills, a little later
                batch.settle(job, MeasureStatus.RUN_ERROR, f"lost {MAX_LOST} workers; {error}")
            else:
                batch.queue.append(job)

    def _blame(
        self, worker: WorkerState, batch: MeasureBatch, status: MeasureStatus, error: str
    ) -> None:
        culprit = worker.owes[0]
        log.debug("worker %d lost with %s: %s", worker.process.pid, culprit, error)
        if isinstance(culprit, str):
            self._settle_task(batch, culprit, status, error)
        elif culprit not in worker.ran:
            if culprit < 0:
                self._anchors.give_up(culprit)
            else:
                batch.settle(culprit, status, error)
        elif len(others := [job for job in worker.ran if job >= 0]) == 1:  # beside its anchor
            batch.settle(others[0], status, error)
        # Of several that are timed in turns nobody is to blame; they are timed again, one by one.

    def _settle_task(
        self, batch: MeasureBatch, name: str, status: MeasureStatus, error: str
    ) -> None:
        for job, own in enumerate(batch.names):
            if own == name and job not in batch.results:
                batch.settle(job, status, f"no reference to check against: {error}")
        batch.queue = deque(j for j in batch.queue if j not in batch.results)

    def _limit_s(self, worker: WorkerState, job_s: float) -> float:
        if not worker.ready:
            return self.limits.start_s
        if isinstance(worker.owes[0], str):
            return self.limits.task_s
        return job_s * max(1, len(worker.ran))  # those are timed in turns

    def _wait(
        self, busy: Sequence[WorkerState], batch: MeasureBatch, job_s: float
    ) -> list[WorkerState]:
        """Workers that have something to say; those over their limit are lost on the way."""
        now = time.monotonic()
        left = min(w.since + self._limit_s(w, job_s) - now for w in busy)
        left = min(left, self._deadline - now)
        ready = multiprocessing.connection.wait([w.process.fileno() for w in busy], max(0.0, left))
        if time.monotonic() >= self._deadline:
            raise OutOfTimeError
        if not ready:
            now = time.monotonic()
            for worker in busy:
                limit = self._limit_s(worker, job_s)
                if now - worker.since >= limit:
                    what = f"no answer within {limit:g} s"
                    self._lose(worker, batch, MeasureStatus.TIMEOUT, what)
        return [w for w in busy if w in self._workers and w.process.fileno() in ready]

    def _receive(self, worker: WorkerState) -> list[Message]:
        messages = worker.process.receive()
        if messages:
            worker.since = time.monotonic()
        return messages

    def _on_hello(self, message: Message) -> None:
        """A worker has started."""


def kill_all(workers: list[WorkerState]) -> None:
    while workers:
        worker = workers.pop()
        worker.process.kill()
        worker.process.forget()
