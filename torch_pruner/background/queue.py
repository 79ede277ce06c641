"""What is to be compiled beside the user's work, in which order, and who hears of the results.

One thread per process asks another process for one thing after the other. Jobs are held weakly:
what nobody can call any more is not compiled. In a forked child the jobs that were open begin anew.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner import fork_locks
from torch_pruner.background.request import CompileRequest
from torch_pruner.cache.fork_hooks import close_at_exit, renew_after_fork
from torch_pruner.compiler.elsewhere import compiling
from torch_pruner.compiler.progress import StatusLine
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.background.compile_process import CompileProcess
    from torch_pruner.background.request import Answer
    from torch_pruner.config import Config
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.layout import Order

log = logger(__name__)

IDLE_S = 30.0  # without work for so long, the process is let go
HOLD_S = 10.0  # that a fork waits for the thread
JOIN_S = 10.0  # that an interpreter waits at its end for what the thread is in the middle of


class Job(ABC):
    """Something to be done in steps, with graphs compiled elsewhere.

    All methods are called by the queue's thread.
    """

    name: str
    """For logs."""
    doing: str = ""
    """What the next step is, and what runs meanwhile, for people; "" where nobody is to be told."""
    progress: bool | str = False
    """The option."""
    error: Exception | None = None
    """What ended it, for who waits; None where nothing did, or nobody is to hear of it."""

    @abstractmethod
    def step(self) -> bool:
        """Do the next step. Whether there is another, after those of other jobs."""

    @abstractmethod
    def failed(self, error: Exception) -> None:
        """A step raised ``error``; no other follows it."""


@dataclass(order=True)
class _Entry:
    urgency: int  # steps that were taken before: first steps come first
    number: int
    job: Callable[[], Job | None] = field(compare=False)


class JobQueue:
    """Jobs and the thread that sees to them. Safe for several threads."""

    def __init__(self, process: Callable[[], CompileProcess] | None = None) -> None:
        self._make = process or _compile_process
        self._count = itertools.count()
        self._entries: list[_Entry] = []
        self._start_over()
        renew_after_fork(self)
        close_at_exit(self)
        _living.add(self)

    def _start_over(self) -> None:
        self._changed = threading.Condition()
        self._works = threading.Lock()  # held by the thread but where it waits for the process
        self._thread: threading.Thread | None = None
        self._process: CompileProcess | None = None
        self._busy: _Entry | None = None
        self._soon: list[Callable[[], None]] = []
        self._errors: list[Exception] = []
        self._closed = False

    def after_fork(self) -> None:
        """In a child the thread and the process are the parent's, the jobs are its own, too."""
        if self._busy is not None:
            heapq.heappush(self._entries, self._busy)
        self._start_over()

    def hold(self) -> Callable[[], object]:
        """Before this process forks: wait until the thread holds nothing that a child may need.

        That is a lock of an import, of a library that is being loaded, of a call that is compared.
        Returns what lets it go on.
        """
        works = self._works
        return works.release if works.acquire(timeout=HOLD_S) else lambda: None

    def submit(self, job: Job) -> None:
        """See to ``job``, which the caller holds on to."""
        with self._changed:
            self._add(_Entry(0, next(self._count), weakref.ref(job)))

    def soon(self, work: Callable[[], None]) -> None:
        """Call ``work`` between two steps, in the queue's thread."""
        with self._changed:
            self._soon.append(work)
            self._wake()

    def poke(self) -> None:
        """Go on in a forked child. Cheap where nothing has to be done."""
        if self._thread is None and self._entries:
            with self._changed:
                self._wake()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until nothing is left to do; whether that was within ``timeout_s`` seconds.

        Raises the first error of a job that is to be heard of, once.
        """
        with self._changed:
            if self._entries:
                self._wake()
            done = self._changed.wait_for(self._is_done, timeout_s)
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]
        return done

    def close(self) -> None:
        """Stop, whatever is left; waits for what the thread is in the middle of."""
        with self._changed:
            self._closed = True
            thread, process = self._thread, self._process
            self._changed.notify_all()
        if process is not None:
            process.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)

    def _is_done(self) -> bool:
        return not (self._entries or self._soon or self._busy) or self._closed

    def _add(self, entry: _Entry) -> None:
        heapq.heappush(self._entries, entry)
        self._wake()

    def _wake(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="torch_pruner", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._entries or self._soon or self._closed):
                    self._changed.wait(IDLE_S)
                if self._closed:
                    return
                work = self._soon.pop(0) if self._soon else None
                if work is None:
                    if not self._entries:
                        self._thread, process = None, self._process
                        self._process = None
                        break
                    self._busy = heapq.heappop(self._entries)
            with self._works:
                if work is not None:
                    _guarded(work)
                elif self._busy is not None:
                    self._see_to(self._busy)
            with self._changed:
                self._busy = None
                self._changed.notify_all()
        if process is not None:
            process.rest()

    def _see_to(self, entry: _Entry) -> None:
        """One step of a job, and the next one queued."""
        job = entry.job()
        if job is None:
            return
        line = StatusLine(job.progress)
        try:
            line.show(f"in the background: {job.doing}; {len(self._entries)} more")
            with compiling(self._compiled):
                more = job.step()
        except Exception as err:
            if not self._closed:
                self._fail(job, err)
            return
        finally:
            line.close()
        if more:
            with self._changed:
                self._add(_Entry(entry.urgency + 1, next(self._count), entry.job))

    def _fail(self, job: Job, error: Exception) -> None:
        _guarded(lambda: job.failed(error))
        if job.error is not None:
            with self._changed:
                self._errors.append(job.error)

    def _compiled(
        self, config: Config, graph: Graph, inputs: Sequence[Order], outputs: Sequence[Order]
    ) -> Answer:
        with self._changed:
            if self._process is None:
                self._process = self._make()
            process = self._process
        request = CompileRequest(config, graph, tuple(inputs), tuple(outputs))
        self._works.release()
        try:
            return process.compile(request)
        finally:
            self._works.acquire()


def _compile_process() -> CompileProcess:
    """Imported when something has to be compiled: who finds everything needs no tuner."""
    from torch_pruner.background.compile_process import CompileProcess

    return CompileProcess()


def _guarded(work: Callable[[], None]) -> None:
    """What goes wrong in it ends nothing: the thread goes on."""
    try:
        work()
    except Exception:
        log.warning("a step of compiling in the background failed", exc_info=True)


_living: weakref.WeakSet[JobQueue] = weakref.WeakSet()
_held: list[Callable[[], object]] = []


def _before_fork() -> None:
    _held.extend(queue.hold() for queue in list(_living))


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop()()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
os.register_at_fork(after_in_child=_held.clear)

_shared: JobQueue | None = None
_lock = fork_locks.lock()


def shared_queue() -> JobQueue:
    """The queue of this process."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = JobQueue()
        return _shared
