"""Ctrl-C ends a command within two seconds, whatever it is doing.

Python raises ``KeyboardInterrupt`` in the main thread only when that comes back from C, and
compiling a kernel may take many seconds there. What was measured is in the cache already, so a
thread that hears of the signal ends the process where the main thread does not. Only the command
line does this: the signals of an application are its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

GRACE_S = 1.0  # for the main thread to end by itself
STATUS = 130


@contextlib.contextmanager
def prompt() -> Iterator[threading.Event]:
    """In the block, SIGINT raises ``KeyboardInterrupt``; ``GRACE_S`` later it ends the process.

    The event says that it came. Does nothing outside the main thread, or where a host program
    handles the signal itself.
    """
    came = threading.Event()
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield came
        return
    heard, told = socket.socketpair()
    told.setblocking(False)
    done = threading.Event()
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(heard, came, done), daemon=True).start()
    try:
        yield came
    finally:
        signal.set_wakeup_fd(before)
        done.set()
        told.close()


def leave() -> None:
    """End the process at once: it takes torch seconds to be taken down."""
    # Workers have sessions of their own and did not hear of the signal.
    if (process := sys.modules.get("torch_pruner.tuner.measure.process")) is not None:
        process.kill_all()
    os._exit(STATUS)


def _watch(heard: socket.socket, came: threading.Event, done: threading.Event) -> None:
    """Wait for SIGINT, then for the command to end; end the process if it does not."""
    with heard:
        while (data := heard.recv(64)) and signal.SIGINT not in data:
            pass
    if not data:
        return
    came.set()
    if done.wait(GRACE_S):
        return
    os.write(2, b"torch-pruner: interrupted; what was measured is kept; run it again to go on\n")
    leave()
