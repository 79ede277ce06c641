"""Measure on this machine: workers build in parallel, then one at a time times what it built.

Candidates go to long-lived worker processes (``worker.py``) in two phases. While anything builds
nothing is timed, and one worker times while the others wait, because kernels use every thread of
the machine. A worker that hangs, crashes or runs over its limit costs its candidate a ``timeout``
or ``run_error``; what else it held is built again elsewhere.
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
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner.exc import MeasureError, WorkerDied
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.log import PhaseTimer, logger
from torch_pruner.task import MeasureInput, MeasureResult, MeasureStatus
from torch_pruner.tuner.measure.base import EvaluatorSpec, MeasureExecutor
from torch_pruner.tuner.measure.jobs import (
    Batch,
    Limits,
    WorkerState,
    families_message,
    groups,
    task_message,
)
from torch_pruner.tuner.measure.pace import PACE, Anchors
from torch_pruner.tuner.measure.process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch_pruner.tuner.measure.protocol import Message

log = logger(__name__)

TVM_BUILDER = "torch_pruner.tuner.measure._tvm:TvmBuilder"
MAX_LOST = 3  # times that a job's worker may die without a culprit
MAX_STARTS = 3  # in a row without an answer, before the executor gives up
FINAL_REPEATS = 9
WINDOW = 2  # builds on their way to one worker: it never waits for its parent
AGAIN = 2  # more times that a group is timed, whose anchor says that the moment was a bad one
PATIENCE = 2  # groups in a row that no repetition helped, after which there is none
MAX_ANCHORS = 64  # that a worker keeps


class OutOfTimeError(Exception):
    """The time of ``within`` is over."""


class LocalExecutor(MeasureExecutor):
    """Contract of ``MeasureExecutor`` on the CPU of this machine; one ``measure`` at a time."""

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
    ) -> None:
        self.threads = threads
        self.evaluator = evaluator or EvaluatorSpec()
        self.device = device or DeviceFingerprint.detect()
        self._environment = dict(environment or {})
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
        self._lock = threading.Lock()
        self._closed = False
        self._deadline = math.inf
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        return {name: self._timer.seconds[name] for name in ("build", "measure")}

    def start(self) -> None:
        with self._lock:
            self._reap()
            self._respawn()

    def close(self) -> None:
        self._closed = True
        _kill_all(self._workers)

    def race(self, inputs: Sequence[MeasureInput]) -> list[MeasureResult]:
        return self.measure(inputs, FINAL_REPEATS)

    def measure(self, inputs: Sequence[MeasureInput], race: int = 0) -> list[MeasureResult]:
        """``race``: with so many repeats of each, all by one worker, which times them in turns."""
        with self._lock:
            names = [f"{i.task.workload}/{i.task.threads}" for i in inputs]
            batch = Batch(inputs, names, queue=deque(range(len(inputs))), race=race)
            try:
                self._reap()
                while batch.queue:
                    with self._timer.phase("build"):
                        self._build(batch)
                    with self._timer.phase("measure"):
                        self._time(batch)
            except OutOfTimeError:
                _kill_all(self._workers)
            except BaseException:
                _kill_all(self._workers)  # their answers would come in the next call
                raise
            results = [batch.results[job] for job in sorted(batch.results)]
            names = [names[job] for job in sorted(batch.results)]
            self.n_measured += len(results)
            for name in dict.fromkeys(names):
                own = [r for r, n in zip(results, names, strict=True) if n == name]
                self._anchors.choose(name, own)
            return results

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
        """Of a worker's process."""
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
            raise MeasureError(
                f"{MAX_STARTS} measurement workers in a row did not start;"
                " run `torch-pruner doctor`. "
                f"The last one said: {words or 'nothing'}"
            )

    def _died(
        self, worker: WorkerState, batch: Batch, status: MeasureStatus, err: WorkerDied
    ) -> None:
        self._lose(worker, batch, status, str(err), blame=self._blames(err))

    def _blames(self, err: WorkerDied) -> bool:
        """Whether the candidate that a worker was busy with may have ended it."""
        # Candidates do not kill with SIGKILL: the system (memory) or an operator did.
        return err.exitcode != -signal.SIGKILL

    def _lose(
        self,
        worker: WorkerState,
        batch: Batch,
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

    def _blame(self, worker: WorkerState, batch: Batch, status: MeasureStatus, error: str) -> None:
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

    def _settle_task(self, batch: Batch, name: str, status: MeasureStatus, error: str) -> None:
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

    def _wait(self, busy: Sequence[WorkerState], batch: Batch, job_s: float) -> list[WorkerState]:
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

    # Phases

    def _build(self, batch: Batch) -> None:
        """Until every queued job is built somewhere or settled."""
        for worker in self._workers:
            worker.built.clear()
        while True:
            self._respawn()
            ready = [w for w in self._workers if w.ready]
            for worker in ready[:1] if batch.race else ready:
                if not worker.process.alive and not worker.owes:
                    self._lose(worker, batch, MeasureStatus.RUN_ERROR, "the idle worker died")
                    continue
                # A worker that dies here is noticed below, after what it still said was read.
                with contextlib.suppress(WorkerDied):
                    self._feed(worker, batch)
            # A worker that is still starting counts as busy: it would disturb the timing.
            busy = [w for w in self._workers if w.owes or not w.ready]
            if not busy:
                if batch.queue:
                    continue
                return
            for worker in self._wait(busy, batch, self.limits.build_s):
                try:
                    for message in self._receive(worker):
                        self._on_built(worker, batch, message)
                except WorkerDied as err:
                    self._died(worker, batch, MeasureStatus.BUILD_ERROR, err)

    def _feed(self, worker: WorkerState, batch: Batch) -> None:
        while batch.queue and len(worker.owes) < WINDOW:
            if not worker.owes:
                worker.since = time.monotonic()
            job = batch.queue[0]  # and stays there if the worker dies before it is owed
            name, task = batch.names[job], batch.inputs[job].task
            fresh = name not in worker.tasks
            if fresh:
                worker.tasks.add(name)
                worker.owes.append(name)
            if fresh:
                worker.process.send(families_message())
                worker.process.send(task_message(name, task, self.seed))
            if not batch.race:
                self._feed_anchor(worker, name)
            worker.owes.append(batch.queue.popleft())
            jobs = [{"job": job, "candidate": batch.inputs[job].candidate.to_json()}]
            worker.process.send({"cmd": "build", "task": name, "jobs": jobs})

    def _feed_anchor(self, worker: WorkerState, name: str) -> None:
        """Have a task's anchor built, where the worker does not have it."""
        anchor = self._anchors.of(name)
        if anchor is None or anchor.job in worker.anchors:
            return
        worker.owes.append(anchor.job)
        worker.anchors[anchor.job] = False
        jobs = [{"job": anchor.job, "candidate": anchor.candidate.to_json()}]
        worker.process.send({"cmd": "build", "task": name, "jobs": jobs})
        if len(worker.anchors) > MAX_ANCHORS:
            oldest = next(iter(worker.anchors))
            del worker.anchors[oldest]
            worker.process.send({"cmd": "drop", "jobs": [oldest]})

    def _on_built(self, worker: WorkerState, batch: Batch, message: Message) -> None:
        if "hello" in message:
            worker.ready = True
            self._failed_starts = 0
            self._on_hello(message)
            return
        owed = worker.owes.popleft()
        if isinstance(owed, str):
            if not message["ok"]:
                worker.tasks.discard(owed)
                self._settle_task(batch, owed, MeasureStatus.RUN_ERROR, message["error"])
        elif owed < 0:
            worker.anchors[owed] = message["ok"]
        elif message["ok"]:
            worker.built.append(owed)
        elif owed not in batch.results:
            batch.settle(owed, MeasureStatus(message["status"]), message["error"])

    def _on_hello(self, message: Message) -> None:
        """A worker has started."""

    def _time(self, batch: Batch) -> None:
        """One worker after the other times what it has built; a lost worker's rest is queued."""
        for worker in list(self._workers):
            jobs = [j for j in worker.built if j not in batch.results]
            if jobs and not worker.process.alive:
                self._lose(worker, batch, MeasureStatus.RUN_ERROR, "the idle worker died")
                continue
            for group in groups(batch, jobs, self.evaluator.flush_bytes):
                if worker in self._workers:
                    self._time_group(worker, batch, group)
            if jobs and worker in self._workers:
                self._drop(worker)

    def _drop(self, worker: WorkerState) -> None:
        """Let a worker forget what it has built."""
        with contextlib.suppress(WorkerDied):
            worker.process.send({"cmd": "drop", "jobs": list(worker.built)})
        worker.built.clear()

    def _time_group(self, worker: WorkerState, batch: Batch, group: Sequence[int]) -> None:
        """Time jobs of one task side by side; once more where the moment was a bad one."""
        for _ in range(1 + AGAIN * (self._shaken < PATIENCE)):
            self._time_once(worker, batch, group)
            group = [job for job in group if batch.worked(job)]
            if worker not in self._workers or worker.slower <= PACE or not group:
                break
        self._shaken = self._shaken + 1 if worker.slower > PACE else 0
        self._note_best(batch, group)

    def _note_best(self, batch: Batch, jobs: Iterable[int]) -> None:
        """What others are given up beside, of each task: the times of these jobs count."""
        for job in filter(batch.worked, jobs):
            name, seconds = batch.names[job], batch.results[job].latency_s
            self._best[name] = min(self._best.get(name, math.inf), seconds)

    def _time_once(self, worker: WorkerState, batch: Batch, group: Sequence[int]) -> None:
        self._start_group(worker, batch, group)
        try:
            while worker.owes and worker in self._workers:
                for ready in self._wait([worker], batch, self.limits.run_s):
                    for reply in self._receive(ready):
                        self._on_timed(ready, batch, reply)
        except WorkerDied as err:
            self._died(worker, batch, MeasureStatus.RUN_ERROR, err)

    def _start_group(self, worker: WorkerState, batch: Batch, group: Sequence[int]) -> None:
        anchor = self._anchors.of(batch.names[group[0]])
        alone = any(batch.lost[job] for job in group)  # so that it is known who ends a worker
        usable = anchor is not None and worker.anchors.get(anchor.job) and not batch.race
        along = [anchor.job] if anchor and usable and not alone else []
        worker.owes.extend([*along, *group])
        worker.slower = 1.0
        worker.ran.clear()
        worker.since = time.monotonic()
        evaluator = self.evaluator
        if batch.race:
            evaluator = replace(evaluator, repeat=batch.race, extra=batch.race, early_out=0.0)
        message = {
            "cmd": "time",
            "jobs": [*along, *group],
            "best_s": self._best.get(batch.names[group[0]]),
            "evaluator": evaluator.to_json(),
            "anchor": along[0] if along else None,
        }
        with contextlib.suppress(WorkerDied):
            worker.process.send(message)

    def _on_timed(self, worker: WorkerState, batch: Batch, message: Message) -> None:
        job = worker.owes.popleft()
        assert isinstance(job, int), "tasks are defined while building"
        if message.get("ran"):
            worker.ran.add(job)
            worker.owes.append(job)  # behind those not called yet: the first is the one being run
            return
        worker.ran.discard(job)
        if job < 0:
            worker.slower = self._anchors.slower(job, message.get("run_secs", ()))
            return
        if not message["ok"]:
            batch.settle(job, MeasureStatus(message["status"]), message["error"])
            return
        pace = min(worker.slower, PACE)
        seconds = tuple(float(s) / pace for s in message["run_secs"])
        candidate = batch.inputs[job].candidate
        batch.results[job] = MeasureResult(candidate, MeasureStatus.OK, seconds)


def _kill_all(workers: list[WorkerState]) -> None:
    while workers:
        worker = workers.pop()
        worker.process.kill()
        worker.process.forget()
