"""Processes that build kernels side by side, started before there is anything to build.

They import TVM, which takes a second or two, while this process captures a graph; so this process
need not import it at all.
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner import exc
from torch_pruner.log import logger
from torch_pruner.tuner.measure.jobs import families_message
from torch_pruner.tuner.measure.process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.tuner.measure.protocol import Message

log = logger(__name__)

SERVICE = "torch_pruner.compiler.building.service:make"
ATTEMPTS = 2  # processes that may die over one job
LOOK_S = 1.0  # between looks at whether the processes live


@dataclass(slots=True)
class _Batch:
    """Jobs that are being done: which wait, who is busy with which, and the answers so far."""

    jobs: Sequence[Message]
    waiting: deque[int]
    busy: dict[WorkerProcess, int] = field(default_factory=dict)
    lost: Counter[int] = field(default_factory=Counter)
    answers: dict[int, Message] = field(default_factory=dict)
    greeted: bool = False  # whether any process has begun to work

    def hand_to(self, worker: WorkerProcess) -> None:
        """Give a worker the next job. Raises ``WorkerDied``."""
        job = self.busy[worker] = self.waiting.popleft()
        worker.send(families_message())
        worker.send({**self.jobs[job], "job": job})

    def hear(self, worker: WorkerProcess) -> None:
        """Take what a worker says. Raises ``WorkerDied``."""
        for message in worker.receive():
            self.greeted = True
            if "hello" not in message:
                self.answers[message["job"]] = message
                self.busy.pop(worker, None)

    def lose(self, worker: WorkerProcess, error: exc.WorkerDied) -> None:
        """Let another do what a dead worker was busy with. Raises ``error`` the second time.

        Raises OSError where no process has ever begun: it is not what they were asked for.
        """
        job = self.busy.pop(worker)
        self.lost[job] += 1
        if self.lost[job] == ATTEMPTS:
            if not self.greeted:
                raise OSError(str(error)) from error
            raise error
        log.info("a process that builds died and is started again: %s", error)
        self.waiting.appendleft(job)


class BuildPool:
    """``count`` processes. One ``build`` at a time, from any thread."""

    def __init__(self, count: int, service: str = SERVICE) -> None:
        self._count, self._service = count, service
        self._lock = threading.Lock()
        self._workers: list[WorkerProcess] = []
        self.asked = False  # whether ``build`` was called

    def start(self) -> None:
        """Have the processes begin to import what they need. Raises nothing: ``build`` will."""
        with self._lock, contextlib.suppress(OSError):
            self._fill(self._count)

    def build(self, jobs: Sequence[Message]) -> list[Message]:
        """The answers to ``jobs``, which are begun in their order.

        Raises ``WorkerDied`` if several processes died over a job, ``OSError`` if none can be
        started. After an exception nobody works on any of the jobs.
        """
        self.asked = True
        with self._lock:
            batch = _Batch(jobs, deque(range(len(jobs))))
            with contextlib.ExitStack() as unless_done:
                unless_done.callback(self._end, self._workers)
                while len(batch.answers) < len(jobs):
                    self._advance(batch)
                unless_done.pop_all()
        return [batch.answers[job] for job in range(len(jobs))]

    def close(self) -> None:
        """End the processes; the next ``build`` starts others."""
        with self._lock:
            self._end(self._workers)

    def _advance(self, batch: _Batch) -> None:
        """Give work to who has none, and hear who has something to say."""
        self._fill(min(self._count, len(batch.waiting) + len(batch.busy)))
        idle = [w for w in self._workers if w not in batch.busy]
        for worker in idle[: len(batch.waiting)]:
            self._unless_dead(batch, worker, batch.hand_to)
        for worker in select.select(list(batch.busy), [], [], LOOK_S)[0]:
            self._unless_dead(batch, worker, batch.hear)

    def _unless_dead(
        self, batch: _Batch, worker: WorkerProcess, act: Callable[[WorkerProcess], None]
    ) -> None:
        try:
            act(worker)
        except exc.WorkerDied as err:
            log.debug("the last words of a process that builds: %s", worker.last_words())
            self._end([worker])
            batch.lose(worker, err)

    def _fill(self, count: int) -> None:
        """Have at least ``count`` processes. Raises OSError."""
        while len(self._workers) < count:
            self._workers.append(WorkerProcess(["--relay", self._service], {}))

    def _end(self, workers: list[WorkerProcess]) -> None:
        for worker in list(workers):
            self._workers.remove(worker)
            worker.kill()
            worker.forget()
