"""One worker process seen from its parent: start, send, receive with a deadline, kill as a group.

Knows frames and process groups, not candidates.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from typing import TYPE_CHECKING

from torch_pruner import config
from torch_pruner.exc import WorkerDied
from torch_pruner.tuner.measure.protocol import FrameReader, Message, ProtocolError, encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_living: set[int] = set()  # workers of this process
CHUNK = 1 << 16
TAIL = 2000


def _module_path() -> list[str]:
    """This process's path, so that a worker finds what its parent found.

    The standard library comes first: a file beside the user's script that has the name of one of
    its modules did not disturb the parent, which had imported the module already.
    """
    stdlib = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    stdlib |= {os.path.join(p, "lib-dynload") for p in stdlib}
    return sorted((p for p in sys.path if p), key=lambda p: p not in stdlib)


def kill_all() -> None:
    """End every worker at once, from any thread. For a process that ends without further ado."""
    for pid in list(_living):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


os.register_at_fork(after_in_child=_living.clear)


class WorkerProcess:
    """A running worker. Every method but ``kill`` raises ``WorkerDied`` when it is gone."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """``arguments`` of ``worker.py``."""
        path = os.pathsep.join(_module_path())
        inherited = config.environment()
        module = ["-P", "-m", "torch_pruner.tuner.measure.worker", *arguments]
        self._owner = os.getpid()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the worker
        self._process = subprocess.Popen(
            [sys.executable, *module],
            env={**inherited, **environment, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )
        _living.add(self._process.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._frames = FrameReader()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fileno(self) -> int:
        return self._stdout.fileno()

    def send(self, message: Message, timeout_s: float = 30.0) -> None:
        view = memoryview(encode(message))
        deadline = time.monotonic() + timeout_s
        while view:
            writable = select.poll()
            writable.register(self._stdin, select.POLLOUT)
            if not writable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise self._died()
            try:
                view = view[os.write(self._stdin.fileno(), view[:CHUNK]) :]
            except BlockingIOError:
                continue
            except OSError as err:
                raise self._died() from err

    def receive(self) -> list[Message]:
        """Messages that have arrived; waits for nothing. Call it when ``fileno`` is readable."""
        try:
            data = os.read(self._stdout.fileno(), CHUNK)
        except BlockingIOError:
            return []
        if not data:
            raise self._died()
        try:
            return self._frames.feed(data)
        except ProtocolError as err:
            raise self._died() from err

    def _died(self) -> WorkerDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)  # the pipe closes a moment before the exit status is known
        return WorkerDied(self.pid, self._process.poll())

    def last_words(self) -> str:
        """The end of what the worker wrote to its standard error."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - TAIL))
        return self._stderr.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """End the worker and what it started. Safe to call twice; void in a forked child."""
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _living.discard(self._process.pid)

    def forget(self) -> None:
        """Give back the descriptors, after ``kill``. Safe to call twice."""
        for stream in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(OSError):
                stream.close()
