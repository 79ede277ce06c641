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
    from torch_pruner.config import Config
    from torch_pruner.fingerprint import DeviceFingerprint, Gpu
    from torch_pruner.target import TargetSpec
    from torch_pruner.tuner.measure.base import MeasureExecutor

IDLE_S = 30.0  # workers hold memory; without work for this long they are let go

_lock = fork_locks.rlock()
_running: dict[tuple[str, int, int, str, str], MeasureExecutor] = {}
_timer: threading.Timer | None = None


def executor_for(config: Config, threads: int, gpu: Gpu | None = None) -> MeasureExecutor:
    """The executor for these settings, its workers starting in the background.

    ``gpu``: the device to time on, instead of the CPU.
    """
    from torch_pruner.tuner import make_executor

    with _lock:
        _cancel()
        tracker = config.tracker if config.executor == "rpc" else None
        threads = 1 if tracker else threads  # of what runs here; each task says its own
        key = (config.executor, threads, config.seed, gpu.selector if gpu else "", tracker or "")
        if key not in _running:
            _running[key] = make_executor(config.executor, threads, config.seed, gpu, tracker)
            _running[key].start()
        return _running[key]


def fleet(config: Config) -> tuple[TargetSpec, DeviceFingerprint]:
    """What the devices of ``config.tracker`` are; asks them. Raises ``MeasureError``."""
    from torch_pruner.tuner.measure.rpc import RpcExecutor

    executor = executor_for(config, 1)
    assert isinstance(executor, RpcExecutor)
    executor.wait_ready()
    release_later()
    assert executor.target is not None
    return executor.target, executor.device


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
