"""A tracker and servers on this host, for tests and examples: started, stopped and killed."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from torch_pruner.exc import MeasureError
from torch_pruner.tuner.measure.rpc import registered

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "here"
START_S = 60.0


class Fleet:
    """Processes on loopback. ``tracker`` is what the option of that name takes."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.tracker = f"127.0.0.1:{self.port}/{KEY}"
        address = ["--host", "127.0.0.1", "--port", str(self.port), "--port-end", "65535"]
        self._tracker = _started("tvm.exec.rpc_tracker", *address, "--silent")
        self.servers: list[subprocess.Popen[bytes]] = []

    def serve(self, module: str = "torch_pruner.tuner.measure.rpc_server", *more: str) -> None:
        """One more server, once the tracker knows it."""
        before = self.count()
        tracker = ["--tracker", f"127.0.0.1:{self.port}", "--key", KEY]
        port = str(20_000 + self.port % 10_000 + 110 * len(self.servers))
        self.servers.append(_started(module, *tracker, "--port", port, *more))
        deadline = time.monotonic() + START_S
        while self.count() <= before:
            if time.monotonic() > deadline or self.servers[-1].poll() is not None:
                raise RuntimeError("the server did not start")
            time.sleep(0.1)

    def count(self) -> int:
        """Devices that the tracker knows; 0 while it is not there."""
        try:
            return registered(self.tracker)
        except MeasureError:
            return 0

    def signal(self, server: int, number: int) -> None:
        """To a server and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            _signal_group(self.servers[server], number)

    def close(self) -> None:
        for process in (*self.servers, self._tracker):
            with contextlib.suppress(ProcessLookupError):
                _signal_group(process, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def fleet(servers: int) -> Iterator[Fleet]:
    found = Fleet()
    try:
        for _ in range(servers):
            found.serve()
        yield found
    finally:
        found.close()


def _started(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    import psutil

    found = psutil.Process(process.pid)
    for each in (*found.children(recursive=True), found):  # servers have sessions of their own
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)
