"""Ctrl-C while the main thread is in C, where no ``KeyboardInterrupt`` is raised."""

from __future__ import annotations

import signal
import subprocess
import sys

STUCK = """
import ctypes, sys, threading
from torch_pruner.cli import main
def stuck(args):
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    # Another thread says it, later: a signal before the second lock is raised by Python.
    threading.Timer(0.5, print, ["ready"], {"flush": True}).start()
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
main._run = stuck  # locked twice, a mutex is waited for for ever
sys.exit(main.main(["doctor"]))
"""
PYTHON = """
import sys, time
from torch_pruner.cli import main
def busy(args):
    print("ready", flush=True)
    time.sleep(60)
main._run = busy
sys.exit(main.main(["doctor"]))
"""


def heard() -> None:
    """A shell in the background has its children ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted(script: str) -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heard,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    return process.wait(30), process.communicate()[1]


def test_a_command_that_is_stuck_in_c_ends() -> None:
    status, err = interrupted(STUCK)
    assert (status, err.count("\n")) == (130, 1)
    assert "run it again to go on" in err


def test_a_command_in_python_ends_by_itself() -> None:
    assert interrupted(PYTHON) == (130, "torch-pruner: interrupted\n")
