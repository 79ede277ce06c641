"""Loggers under ``torch_pruner``, warnings that appear once, and seconds by phase.

Warnings reach the user: where no handler of the application's would take them they go to standard
error, as Python's own last resort does. All else is silent unless asked: only ``configure`` (called
with the value of ``TORCH_PRUNER_LOG``) adds a handler that writes to standard error.
``TORCH_LOGS="+torch_pruner"`` needs nothing of this.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch_pruner import fork_locks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = "torch_pruner"
LEVELS = ("debug", "info", "warning", "error", "critical")
PHASES = ("capture", "lower", "draft", "verify", "build", "measure", "train", "other")


class _LastResort(logging.Handler):
    """Writes a warning that nobody else takes, with the package's name before it."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None and not logging.root.handlers and _root.handlers == [self]:
            sys.stderr.write(f"{ROOT}: {record.getMessage()}\n")


_root = logging.getLogger(ROOT)
_root.addHandler(_LastResort(logging.WARNING))
_lock = fork_locks.lock()
_warned: set[tuple[str, str]] = set()
_handler: logging.Handler | None = None


def logger(name: str = "") -> logging.Logger:
    """The logger ``torch_pruner.<name>``; takes a bare name or a module's ``__name__``."""
    if not name or name == ROOT:
        return _root
    return logging.getLogger(name if name.startswith(f"{ROOT}.") else f"{ROOT}.{name}")


def configure(level: str | None) -> None:
    """Write records of ``level`` and above to standard error; ``None`` ends that again.

    Idempotent. Does not touch a level or a handler that the application has set itself.
    """
    global _handler
    with _lock:
        if level is None:
            if _handler is not None:
                _root.removeHandler(_handler)
                _root.setLevel(logging.NOTSET)
                _handler = None
            return
        if _handler is None:
            _handler = logging.StreamHandler()
            layout = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
            _handler.setFormatter(logging.Formatter(layout))
            _root.addHandler(_handler)
        _handler.setLevel(level.upper())
        _root.setLevel(level.upper())


def warn_once(log: logging.Logger, key: str, msg: str, *args: Any) -> None:
    """Warn the first time that this logger sees ``key`` in this process."""
    with _lock:
        if (log.name, key) in _warned:
            return
        _warned.add((log.name, key))
    log.warning(msg, *args, stacklevel=2)


def forget_warnings() -> None:
    """Let every ``warn_once`` warn again."""
    with _lock:
        _warned.clear()


class PhaseTimer:
    """Seconds spent in each phase of one compilation, summed over threads.

    A phase inside another takes its time from the outer one, so within one thread the phases add
    up to what the clock saw. Phases of threads that run at the same time are added, as CPU time is.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the ``with`` body as ``name``, less what inner phases take."""
        assert name in PHASES, name
        stack: list[str] = self._local.__dict__.setdefault("stack", [])
        self._charge(stack)
        stack.append(name)
        try:
            yield
        finally:
            self._charge(stack)
            stack.pop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What passes in the ``with`` body counts nowhere: somebody else counts it."""
        stack: list[str] = self._local.__dict__.setdefault("stack", [])
        self._charge(stack)
        try:
            yield
        finally:
            self._local.since = self._clock()

    def add(self, name: str, seconds: float) -> None:
        """Add time that a worker process reported."""
        with self._lock:
            self._seconds[name] += seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, every phase present, without the stretch that is running now."""
        with self._lock:
            return dict(self._seconds)

    @property
    def elapsed_s(self) -> float:
        """Seconds since this timer was made, when the compilation began."""
        return self._clock() - self._began

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def _charge(self, stack: list[str]) -> None:
        """Book the time since the last switch on the phase that ran until now."""
        now = self._clock()
        if stack:
            self.add(stack[-1], now - self._local.since)
        self._local.since = now
