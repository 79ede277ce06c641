"""Measure on this machine: workers build in parallel, then one at a time times what it built.

Candidates go to long-lived worker processes (``worker.py``) in two phases. While anything builds
nothing is timed, and one worker times while the others wait, because kernels use every thread of
the machine. A worker that hangs, crashes or runs over its limit costs its candidate a ``timeout``
or ``run_error``; what else it held is built again elsewhere.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner.exc import WorkerDied
from torch_pruner.log import logger, warn_once
from torch_pruner.pareto import TIE
from torch_pruner.task import MeasureInput, MeasureResult, MeasureStatus
from torch_pruner.tuner.measure.jobs import (
    MeasureBatch,
    WorkerState,
    families_message,
    groups,
    task_message,
)
from torch_pruner.tuner.measure.pace import PACE
from torch_pruner.tuner.measure.worker_executor import OutOfTimeError, WorkerExecutor, kill_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_pruner.tuner.measure.protocol import Message

log = logger(__name__)

FINAL_REPEATS = 9
NO_JOULES = "energy of a kernel is not known: %s"
WINDOW = 2  # builds on their way to one worker: it never waits for its parent
AGAIN = 2  # more times that a group is timed, whose anchor says that the moment was a bad one
PATIENCE = 2  # groups in a row that no repetition helped, after which there is none
MAX_ANCHORS = 64  # that a worker keeps


class LocalExecutor(WorkerExecutor):
    """Contract of ``MeasureExecutor`` on the CPU of this machine; one ``measure`` at a time."""

    def race(self, inputs: Sequence[MeasureInput]) -> list[MeasureResult]:
        return self.measure(inputs, FINAL_REPEATS)

    def measure(self, inputs: Sequence[MeasureInput], race: int = 0) -> list[MeasureResult]:
        """``race``: with so many repeats of each, all by one worker, which times them in turns."""
        with self._lock:
            names = [f"{i.task.workload}/{i.task.threads}" for i in inputs]
            batch = MeasureBatch(inputs, names, queue=deque(range(len(inputs))), race=race)
            try:
                self._reap()
                while batch.queue:
                    with self._timer.phase("build"):
                        self._build(batch)
                    with self._timer.phase("measure"):
                        self._time(batch)
            except OutOfTimeError:
                kill_all(self._workers)
            except BaseException:
                kill_all(self._workers)  # their answers would come in the next call
                raise
            results = [batch.results[job] for job in sorted(batch.results)]
            names = [names[job] for job in sorted(batch.results)]
            self.n_measured += len(results)
            for name in dict.fromkeys(names):
                own = [r for r, n in zip(results, names, strict=True) if n == name]
                self._anchors.choose(name, own)
            return results

    def _build(self, batch: MeasureBatch) -> None:
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

    def _feed(self, worker: WorkerState, batch: MeasureBatch) -> None:
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

    def _on_built(self, worker: WorkerState, batch: MeasureBatch, message: Message) -> None:
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

    def _time(self, batch: MeasureBatch) -> None:
        """One worker after the other times what it has built; a lost worker's rest is queued."""
        for worker in list(self._workers):
            jobs = [j for j in worker.built if j not in batch.results]
            if jobs and not worker.process.alive:
                self._lose(worker, batch, MeasureStatus.RUN_ERROR, "the idle worker died")
                continue
            for group in groups(batch, jobs, self.evaluator.flush_bytes):
                if worker in self._workers:
                    self._time_group(worker, batch, group)
            if batch.race and self._meter is not None:
                self._count_joules(worker, batch, jobs)
            if jobs and worker in self._workers:
                self._drop(worker)

    def _count_joules(self, worker: WorkerState, batch: MeasureBatch, jobs: Sequence[int]) -> None:
        """Have the joules counted of jobs that are as fast as the fastest, one after another."""
        limit = TIE * min(
            (batch.results[job].latency_s for job in jobs if job in batch.results),
            default=math.inf,
        )
        assert self._meter is not None
        for job in (j for j in jobs if batch.worked(j) and batch.results[j].latency_s <= limit):
            if worker not in self._workers:
                return
            message = {"cmd": "energy", "job": job, "meter": self._meter.to_json()}
            worker.owes.append(job)
            worker.since = time.monotonic()
            with contextlib.suppress(WorkerDied):
                worker.process.send({**message, "evaluator": self.evaluator.to_json()})
            self._await_joules(worker, batch)

    def _await_joules(self, worker: WorkerState, batch: MeasureBatch) -> None:
        try:
            while worker.owes and worker in self._workers:
                for ready in self._wait([worker], batch, self.limits.run_s):
                    for reply in self._receive(ready):
                        self._on_joules(ready, batch, reply)
        except WorkerDied as err:
            self._died(worker, batch, MeasureStatus.RUN_ERROR, err)

    def _on_joules(self, worker: WorkerState, batch: MeasureBatch, message: Message) -> None:
        job = worker.owes.popleft()
        assert isinstance(job, int), "tasks are defined while building"
        if message["ok"]:
            batch.results[job] = replace(batch.results[job], joules=float(message["joules"]))
        else:
            warn_once(log, "joules", NO_JOULES, message["error"])

    def _drop(self, worker: WorkerState) -> None:
        """Let a worker forget what it has built."""
        with contextlib.suppress(WorkerDied):
            worker.process.send({"cmd": "drop", "jobs": list(worker.built)})
        worker.built.clear()

    def _time_group(self, worker: WorkerState, batch: MeasureBatch, group: Sequence[int]) -> None:
        """Time jobs of one task side by side; once more where the moment was a bad one."""
        for _ in range(1 + AGAIN * (self._shaken < PATIENCE)):
            self._time_once(worker, batch, group)
            group = [job for job in group if batch.worked(job)]
            if worker not in self._workers or worker.slower <= PACE or not group:
                break
        self._shaken = self._shaken + 1 if worker.slower > PACE else 0
        self._note_best(batch, group)

    def _note_best(self, batch: MeasureBatch, jobs: Iterable[int]) -> None:
        """Note the best time of each task, beside which hopeless candidates are given up."""
        for job in filter(batch.worked, jobs):
            name, seconds = batch.names[job], batch.results[job].latency_s
            self._best[name] = min(self._best.get(name, math.inf), seconds)

    def _time_once(self, worker: WorkerState, batch: MeasureBatch, group: Sequence[int]) -> None:
        self._start_group(worker, batch, group)
        try:
            while worker.owes and worker in self._workers:
                for ready in self._wait([worker], batch, self.limits.run_s):
                    for reply in self._receive(ready):
                        self._on_timed(ready, batch, reply)
        except WorkerDied as err:
            self._died(worker, batch, MeasureStatus.RUN_ERROR, err)

    def _start_group(self, worker: WorkerState, batch: MeasureBatch, group: Sequence[int]) -> None:
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

    def _on_timed(self, worker: WorkerState, batch: MeasureBatch, message: Message) -> None:
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
