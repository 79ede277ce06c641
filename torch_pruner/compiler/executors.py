"""Processes that time or build kernels, shared by the compilations of this process.

They are slow to start, so they outlive one graph.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from torch_pruner import fork_locks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.compiler.building.pool import BuildPool
    from torch_pruner.tuner.measure.base import MeasureExecutor
    from torch_pruner.tuner.measure.meter import MeterSource

IDLE_S = 30.0  # workers hold memory; without work for this long they are let go

MOST_BUILDERS = 8  # processes that build side by side, of 150 MB each


class Shared(Protocol):
    """Something that has processes."""

    def start(self) -> None:
        """Begin to start them, in the background."""

    def close(self) -> None:
        """End them."""


SharedT = TypeVar("SharedT", bound=Shared)

_lock = fork_locks.rlock()
_running: dict[tuple[object, ...], Shared] = {}
_timer: threading.Timer | None = None


def shared_executor(key: tuple[object, ...], make: Callable[[], SharedT]) -> SharedT:
    """What has that key, its processes starting in the background; else it is made."""
    with _lock:
        _cancel()
        if key not in _running:
            _running[key] = make()
            _running[key].start()
        return cast("SharedT", _running[key])


def local_executor(threads: int, seed: int, meter: MeterSource | None = None) -> MeasureExecutor:
    """Workers on the CPU of this machine, for kernels that run on ``threads``."""
    from torch_pruner.tuner.measure.local import LocalExecutor

    made: MeasureExecutor = shared_executor(
        ("local", threads, seed, meter), lambda: LocalExecutor(threads, seed=seed, meter=meter)
    )
    return made


def build_pool(threads: int) -> BuildPool:
    """Processes that build kernels, at most as many as ``threads``."""
    from torch_pruner.compiler.building.pool import BuildPool

    count = _builders(threads)
    return shared_executor(("build", count), lambda: BuildPool(count))


def release_needless(threads: int) -> None:
    """Stop processes that began to start and that nobody has asked to build anything: for the
    seconds in which they import TVM they would take the cores from calls."""
    from torch_pruner.compiler.building.pool import BuildPool

    key = ("build", _builders(threads))
    with _lock:
        pool = _running.get(key)
        if isinstance(pool, BuildPool) and not pool.asked:
            del _running[key]
            pool.close()


def _builders(threads: int) -> int:
    return min(threads, MOST_BUILDERS)


def release_later() -> None:
    """Close all unless somebody asks for one again soon."""
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
