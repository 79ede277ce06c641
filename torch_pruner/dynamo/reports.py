"""What the compilations of this process reported, most recent last."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch_pruner.log import logger
from torch_pruner.report import GraphReport, Report

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logger("torch_pruner")
_lock = threading.Lock()
_current: list[GraphReport] = []
_collecting: list[list[GraphReport]] = []


def begin() -> None:
    """A new compilation starts: its graphs (backward ones come later) make up the last report."""
    with _lock:
        _current.clear()


def add(report: GraphReport) -> None:
    """Record one compiled graph and say so in one line."""
    with _lock:
        _current.append(report)
        for sink in _collecting:
            sink.append(report)
    log.info("%s", Report((report,)).summary())


def failed(name: str, reason: str) -> None:
    """Record a graph that runs in eager as a whole."""
    with _lock:
        report = GraphReport(name, 0, 0, 0, 0, 0, notes=(f"not compiled: {reason}",))
        _current.append(report)
        for sink in _collecting:
            sink.append(report)


def last() -> Report | None:
    """The most recent compilation, or None before the first."""
    with _lock:
        return Report(tuple(_current)) if _current else None


@contextmanager
def collect() -> Iterator[list[GraphReport]]:
    """Every graph compiled inside the block."""
    sink: list[GraphReport] = []
    with _lock:
        _collecting.append(sink)
    try:
        yield sink
    finally:
        with _lock:
            _collecting.remove(sink)
