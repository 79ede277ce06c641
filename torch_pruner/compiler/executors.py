"""Measurement executors shared by the compilations of this process.

They are slow to start, so they outlive one graph.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING

from torch_pruner import fork_locks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.tuner.measure.base import MeasureExecutor

IDLE_S = 30.0  # workers hold memory; without work for this long they are let go

_lock = fork_locks.rlock()
_running: dict[tuple[object, ...], MeasureExecutor] = {}
_timer: threading.Timer | None = None


def shared_executor(
    key: tuple[object, ...], make: Callable[[], MeasureExecutor]
) -> MeasureExecutor:
    """The executor of that key, its workers starting in the background; else one is made."""
    with _lock:
        _cancel()
        if key not in _running:
            _running[key] = make()
            _running[key].start()
        return _running[key]


def local_executor(threads: int, seed: int) -> MeasureExecutor:
    """Workers on the CPU of this machine, for kernels that run on ``threads``."""
    from torch_pruner.tuner.measure.local import LocalExecutor

    return shared_executor(("local", threads, seed), lambda: LocalExecutor(threads, seed=seed))


def release_later() -> None:
    """Close the executors unless somebody asks for one again soon."""
    global _timer
    with _lock:
        _cancel()
        if _running:
            _timer = threading.Timer(IDLE_S, close_all)
            _timer.daemon = True
            _timer.start()


def close_all() -> None:
    """Stop every worker."""
    with _lock:
        _cancel()
        while _running:
            _running.popitem()[1].close()


def _cancel() -> None:
    global _timer
    if _timer is not None:
        _timer.cancel()
        _timer = None


def _after_fork() -> None:
    """The workers are the parent's: a child that wrote to them would disturb it."""
    global _timer
    _timer = None
    _running.clear()


atexit.register(close_all)
os.register_at_fork(after_in_child=_after_fork)
