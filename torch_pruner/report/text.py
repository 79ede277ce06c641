"""The text of a report for people: the tables that ``print`` and notebooks show."""

from __future__ import annotations

import textwrap
from html import escape
from typing import TYPE_CHECKING

from torch_pruner.text_tables import (
    COLUMNS,
    bytes_text,
    flops_text,
    html_table,
    percent,
    table,
    time_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.report import Report, TaskReport

_ROWS_SHOWN = 20
_ROWS_IN_HTML = 200


def text(report: Report) -> str:
    """Tables of graphs and kernels, what was left to the fallback and why, notes, totals."""
    parts = [_graph_lines(report), _task_table(report), _fallback_lines(report)]
    notes = [textwrap.wrap(f"note: {note}", COLUMNS) for note in report.notes]
    parts += [[line for note in notes for line in note], _totals(report)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _graph_lines(report: Report) -> list[str]:
    if not report.graphs:
        return ["nothing was compiled"]
    told = any(g.runs for g in report.graphs)  # of graphs that are compiled in the background
    headers = ("graph", "operators", "compiled", "FLOPs", "compiled", "regions", "kernels")
    rows = [
        (
            g.name,
            str(g.ops_total),
            percent(g.ops_compiled, g.ops_total),
            flops_text(g.flops_total),
            percent(g.flops_compiled, g.flops_total),
            str(g.regions),
            str(len(g.tasks)),
            *((g.runs or "-", g.pending or "-") if told else ()),
        )
        for g in report.graphs
    ]
    more = ("runs", "pending") if told else ()
    return table((*headers, *more), rows, align="<>>>>>>" + "<" * len(more))


# A kernel's columns: what stands above, how it is aligned, what is said of it.
_KERNEL_COLUMNS: tuple[tuple[str, str, Callable[[TaskReport], str]], ...] = (
    ("kernel", "<", lambda t: t.name),
    ("source", "<", lambda t: t.source),
    ("effort", "<", lambda t: t.effort or "-"),
    ("weight", ">", lambda t: str(t.weight)),
    ("FLOPs", ">", lambda t: flops_text(t.flops)),
    ("before", ">", lambda t: time_text(t.latency_before_s)),
    ("after", ">", lambda t: time_text(t.latency_after_s)),
    ("gain", ">", lambda t: "-" if t.gain is None else f"{t.gain:.2f}x"),
    ("trials", ">", lambda t: str(t.trials)),
    ("schedule", "<", lambda t: t.sketch or t.digest[:8] or "-"),
)


def _kernels(tasks: Sequence[TaskReport]) -> tuple[list[str], list[list[str]], str]:
    """Headers, rows and alignments. What an older version wrote knows no effort."""
    told = any(t.effort for t in tasks)
    columns = [c for c in _KERNEL_COLUMNS if told or c[0] != "effort"]
    rows = [[shown(t) for _, _, shown in columns] for t in tasks]
    return [name for name, _, _ in columns], rows, "".join(align for _, align, _ in columns)


def _task_table(report: Report) -> list[str]:
    if not report.tasks:
        return []
    headers, rows, align = _kernels(report.tasks)
    return table(headers, rows, align=align)


def _fallback_lines(report: Report) -> list[str]:
    """Reasons with how often each applies, the most frequent first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for f in report.ops_fallback:
        groups.setdefault((f.kind, f.detail), []).append(f.node)
    if not groups:
        return []
    lines = [f"left to the fallback: {len(report.ops_fallback)} operators"]
    ranked = sorted(groups.items(), key=lambda item: -len(item[1]))
    for (kind, detail), nodes in ranked[:_ROWS_SHOWN]:
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        text = f"{nodes[0]}{more}: {kind}: {detail}"
        lines += textwrap.wrap(text, COLUMNS, initial_indent="  ", subsequent_indent=" " * 6)
    if len(ranked) > _ROWS_SHOWN:
        lines.append(f"  and {len(ranked) - _ROWS_SHOWN} other reasons (all in to_json())")
    return lines


def _totals(report: Report) -> list[str]:
    count, phases = report.sources, report.seconds
    kernels = ", ".join(f"{n} {name}" for name, n in count.items())
    lines = [f"kernels: {kernels}; {report.trials} trials"]
    timed = [t for t in report.tasks if t.gain is not None]
    if timed:
        before = sum(t.weight * (t.latency_before_s or 0.0) for t in timed)
        after = sum(t.weight * (t.latency_after_s or 0.0) for t in timed)
        lines.append(
            f"kernels timed before and after, by weight: {time_text(before)}"
            f" -> {time_text(after)} ({before / after:.2f}x)"
        )
    spent = ", ".join(f"{name} {s:.2f}" for name, s in phases.items() if s >= 0.005)
    beside = "" if report.dynamo_s is None else f"; torch's Dynamo beside it: {report.dynamo_s:.2f}"
    if spent or beside:
        lines.append(f"seconds: {sum(phases.values()):.2f} ({spent or 'none'}){beside}")
    if report.weight_bytes or report.workspace_bytes:
        packed, work = bytes_text(report.weight_bytes), bytes_text(report.workspace_bytes)
        lines.append(f"memory: {packed} in packed copies of weights, {work} workspace")
    return lines


def html(report: Report) -> str:
    """Graphs and kernels as tables, then the summary. Text that comes from elsewhere is escaped."""
    graphs = [
        (
            g.name,
            f"{g.ops_compiled} of {g.ops_total}",
            percent(g.flops_compiled, g.flops_total),
            str(len(g.tasks)),
            g.runs or "program",
            g.pending or "-",
        )
        for g in report.graphs
    ]
    headers, kernels, _ = _kernels(report.tasks[:_ROWS_IN_HTML])
    parts = [
        html_table(("graph", "operators compiled", "FLOPs", "kernels", "runs", "pending"), graphs),
        html_table(headers, kernels),
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        f"<p>{escape(report.summary())}</p>",
    ]
    return "\n".join(part for part in parts if part)
