"""What the compilations of this process reported, most recent last.

With ``TORCH_TRACE`` each report is in torch's trace, too: an artifact of the compilation that made
it, which tlparse shows beside Dynamo's graphs.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch_pruner import fork_locks
from torch_pruner.log import logger
from torch_pruner.report import GraphReport, Report

if TYPE_CHECKING:
    from collections.abc import Iterator

try:
    from torch._logging._internal import trace_structured
except ImportError:  # another version of torch
    trace_structured = None  # type: ignore[assignment]

ARTIFACT = "torch_pruner_report"
log = logger("torch_pruner")
_lock = fork_locks.lock()
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
    _trace(report)


def renew(report: GraphReport) -> None:
    """Another state of a graph that is compiled in the background, in place of the one before.

    Of a compilation before the last nothing is shown any more.
    """
    with _lock:
        for found in (_current, *_collecting):
            for k, known in enumerate(found):
                if known.name == report.name:
                    found[k] = report
    if not report.pending:
        log.info("%s", Report((report,)).summary())
    _trace(report)


def failed(name: str, reason: str) -> None:
    """Record a graph that runs in eager as a whole."""
    with _lock:
        report = GraphReport(name, 0, 0, 0, 0, 0, notes=(f"not compiled: {reason}",))
        _current.append(report)
        for sink in _collecting:
            sink.append(report)
    _trace(report)


def _trace(report: GraphReport) -> None:
    """Nothing is written, or made, unless torch traces."""
    if trace_structured is not None:
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"{ARTIFACT}_{report.name}", "encoding": "json"},
            payload_fn=lambda: json.dumps(Report((report,)).to_json(), indent=1),
            expect_trace_id=False,
        )


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
