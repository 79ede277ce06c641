"""The process that compiles, seen from who asks: started when needed, gone when it is idle."""

from __future__ import annotations

import select
import threading
from typing import TYPE_CHECKING

from torch_pruner.background.request import Answer
from torch_pruner.exc import CompileError, WorkerDied
from torch_pruner.log import logger
from torch_pruner.tuner.measure.jobs import families_message
from torch_pruner.tuner.measure.process import WorkerProcess

if TYPE_CHECKING:
    from torch_pruner.background.request import CompileRequest
    from torch_pruner.tuner.measure.protocol import Message

log = logger(__name__)

SERVICE = "torch_pruner.background.service:make"
VENDOR = "vendor"  # in the argument of a process that may have to time torch's kernels
ATTEMPTS = 2  # processes that may die over one request
LOOK_S = 0.5  # between looks at whether anybody still wants the answer


class CompileProcess:
    """At most one process, which compiles one request at a time. For one thread, but ``close``."""

    def __init__(self, service: str = SERVICE) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._argument = ""  # of the process
        self._closed = self._waits = False

    def compile(self, request: CompileRequest) -> Answer:
        """Have it compiled.

        Raises ``CompileError`` with what the process says went wrong, ``WorkerDied`` if it died of
        this request more than once, or was closed.
        """
        for attempt in range(1, ATTEMPTS + 1):
            vendor = VENDOR if request.times_vendor else ""
            process = self._started(f"{request.nice} {vendor}".strip())
            try:
                return _answer(self._asked(process, request))
            except WorkerDied as err:
                self._end()
                if attempt == ATTEMPTS or self._closed:
                    raise
                log.info("the process that compiles died and is started again: %s", err)
        raise AssertionError("unreachable")

    def _asked(self, process: WorkerProcess, request: CompileRequest) -> Message:
        """The answer to a request. Raises ``WorkerDied``."""
        self._waits = True
        try:
            process.send(families_message())
            process.send(request.to_message())
            return _received(process)
        finally:
            self._waits = False

    def rest(self) -> None:
        """Let the process go: it holds memory. The next request starts another."""
        self._end()

    def close(self) -> None:
        """End the process, and whatever waits for it, for good. From any thread."""
        self._closed = True
        with self._lock:
            if self._process is not None:
                self._process.kill()
            waits = self._waits
        if not waits:
            self._end()

    def _started(self, argument: str) -> WorkerProcess:
        """The process that was started with ``argument``, which may have to be started."""
        if argument != self._argument:
            self._end()
        with self._lock:
            if self._closed:
                raise WorkerDied(0, None)
            if self._process is None:
                arguments = ["--relay", self._service, "--argument", argument]
                self._process, self._argument = WorkerProcess(arguments, {}), argument
            return self._process

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            if words := process.last_words():
                log.debug("the last words of the process that compiles: %s", words)
            process.forget()


def _received(process: WorkerProcess) -> Message:
    """The answer to what was asked last. Raises ``WorkerDied``."""
    while True:
        for message in process.receive():
            if "hello" not in message:
                return message
        select.select([process], [], [], LOOK_S)


def _answer(message: Message) -> Answer:
    if not message.get("ok"):
        raise CompileError("background", str(message.get("error")))
    try:
        return Answer.from_message(message)
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise CompileError("background", f"an answer that is none: {err!r}") from err
