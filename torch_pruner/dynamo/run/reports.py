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

try:
    from torch._dynamo.utils import get_compilation_metrics
    from torch._guards import CompileContext
except ImportError:  # another version of torch: what Dynamo took is not told
    CompileContext = None  # type: ignore[assignment,misc]

ARTIFACT = "torch_pruner_report"
log = logger("torch_pruner")
_lock = fork_locks.lock()
_current: list[GraphReport] = []
_collecting: list[list[GraphReport]] = []
_compile_id: str | None = None  # torch's name for the compilation that made `_current`


def begin() -> None:
    """A new compilation starts: its graphs (backward ones come later) make up the last report."""
    global _compile_id
    with _lock:
        _current.clear()
        compiling = None if CompileContext is None else CompileContext.current_compile_id()
        _compile_id = None if compiling is None else str(compiling)


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
        graphs, compile_id = tuple(_current), _compile_id
    return Report(graphs, _dynamo_seconds(compile_id)) if graphs else None


def _dynamo_seconds(compile_id: str | None) -> float | None:
    """What Dynamo took for one function, its backends apart, once it is through with it."""
    if compile_id is None:
        return None
    for metrics in reversed(get_compilation_metrics()):
        whole = getattr(metrics, "entire_frame_compile_time_s", None)
        backend = getattr(metrics, "backend_compile_time_s", None)
        known = getattr(metrics, "compile_id", None) == compile_id
        if known and isinstance(whole, float) and isinstance(backend, float):
            return max(whole - backend, 0.0)
    return None


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
