"""``torch-pruner explain MODEL --html FILE``: an explanation as one page that needs nothing else.

In: an ``Explanation``. Out: HTML with its style inside, no script and no reference to anything, so
that it can be attached to a bug report. All text is escaped: names come from users' models.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from torch_pruner.text_tables import flops_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_pruner.dynamo.api import Explanation, GraphExplanation, TaskExplanation

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --dim: #5c6575; --line: #dfe3ea; --paper: #ffffff;
  --soft: #f4f6f9; --ours: #2f6fed; --theirs: #d98324; --bar: #2f6fed; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --dim: #9aa3b2; --line: #333a47;
  --paper: #14171d; --soft: #1d222b; --ours: #6b9bff; --theirs: #e5a257; --bar: #6b9bff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 32px 24px 64px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 40px 0 8px; }
h3 { font-size: 14px; margin: 24px 0 8px; color: var(--dim); font-weight: 600; }
p { margin: 0 0 12px; color: var(--dim); }
dl { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0 0; }
dl div { background: var(--soft); border-radius: 8px; padding: 10px 16px; min-width: 150px; }
dt { color: var(--dim); font-size: 13px; } dd { margin: 0; font-size: 20px; font-weight: 600; }
.steps { display: flex; gap: 3px; border-radius: 6px; overflow: hidden; }
.steps span { min-width: 10px; height: 30px; background: var(--ours); color: var(--paper);
  font-size: 12px; line-height: 30px; text-align: center; overflow: hidden; white-space: nowrap; }
.steps span.eager { background: var(--theirs); }
ol { margin: 8px 0 0; padding-left: 24px; color: var(--dim); font-size: 13px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { color: var(--dim); font-weight: 600; }
th:first-child, td:first-child, .left { text-align: left; }
td.text { text-align: left; white-space: normal; }
.share { width: 26%; padding-right: 0; }
.share i { display: inline-block; height: 11px; background: var(--bar); border-radius: 2px;
  vertical-align: -1px; margin-right: 8px; min-width: 1px; }
.share div { display: flex; align-items: center; }
code { font-family: ui-monospace, monospace; font-size: 12px; }
"""


def render(found: Explanation, title: str) -> str:
    """The page."""
    graphs = "".join(map(_graph, found.graphs)) or "<p>Nothing was captured.</p>"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>"
        "<p>What <code>torch.compile(model, backend='pruner')</code> does with it."
        " Nothing was tuned or run for this page.</p>"
        f"{_numbers(found)}{graphs}</body></html>\n"
    )


def _numbers(found: Explanation) -> str:
    total = sum(g.ops_total for g in found.graphs)
    flops = sum(g.flops_total for g in found.graphs)
    done = sum(g.flops_compiled for g in found.graphs)
    tasks = {t.workload: t for g in found.graphs for t in g.tasks}
    cached = sum(t.cached for t in tasks.values())
    facts = [
        ("operators compiled", f"{sum(g.ops_compiled for g in found.graphs)} of {total}"),
        ("of the FLOPs", f"{100 * done / flops:.1f} %" if flops else "100 %"),
        ("kernels in the cache", f"{cached} of {len(tasks)}"),
    ]
    seconds = [_seconds(t) for g in found.graphs for t in g.tasks]
    if seconds and all(s is not None for s in seconds):
        facts.append(("in kernels, per call", _time(sum(s for s in seconds if s is not None))))
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    return f"<dl>{cells}</dl>"


def _graph(graph: GraphExplanation) -> str:
    strip, names = [], []
    for step in graph.partitions:
        eager = step.startswith("eager")
        label = "eager" if eager else "compiled"
        weight = 1 if eager else 4
        strip.append(
            f"<span class='{label}' style='flex:{weight}' title='{escape(step, quote=True)}'>"
            f"{label}</span>"
        )
        names.append(f"<li>{escape(step)}</li>")
    refused = [(r.node, r.kind, r.detail) for r in graph.rejections]
    return (
        f"<h2>{escape(graph.name)}</h2>"
        f"<h3>Steps, in order</h3><div class='steps'>{''.join(strip)}</div>"
        f"<ol>{''.join(names)}</ol>"
        f"<h3>Kernels</h3>{_kernels(graph.tasks)}" + (_refused(refused) if refused else "")
    )


def _kernels(tasks: Sequence[TaskExplanation]) -> str:
    """A line for each, the one with the largest share first: of the time, where all is timed."""
    seconds = {t.workload: _seconds(t) for t in tasks}
    timed = all(s is not None for s in seconds.values())
    costs = {t.workload: seconds[t.workload] if timed else t.flops * t.weight for t in tasks}
    whole = sum(c or 0.0 for c in costs.values()) or 1.0
    most = max((c or 0.0 for c in costs.values()), default=1.0) / whole or 1.0
    rows = []
    for task in sorted(tasks, key=lambda t: -(costs[t.workload] or 0.0)):
        share = 100 * (costs[task.workload] or 0.0) / whole
        one = "" if task.latency_s is None else _time(task.latency_s)
        schedule = task.schedule or "none yet"
        bar = f"<div><i style='width:{0.7 * share / most:.1f}%'></i>{share:.1f} %</div>"
        rows.append(
            f"<td><code>{escape(task.name)}</code></td><td>{escape(task.shape)}</td>"
            f"<td>{escape(task.dtype)}</td><td>{task.weight}</td>"
            f"<td>{escape(flops_text(task.flops))}</td><td>{one}</td>"
            f"<td class='left'>{escape(schedule)}</td><td class='share left'>{bar}</td>"
        )
    header = ["kernel", "shape", "dtype", "calls", "FLOPs", "one call", "schedule"]
    header.append("share of the time" if timed else "share of the FLOPs")
    return _table(header, rows, left=("schedule", header[-1]))


def _refused(rows: Iterable[tuple[str, str, str]]) -> str:
    cells = (
        f"<td><code>{escape(n)}</code></td><td class='text'>{escape(k)}</td>"
        f"<td class='text'>{escape(d)}</td>"
        for n, k, d in rows
    )
    header = ("operator", "kind", "why")
    return "<h3>Left to eager</h3>" + _table(header, cells, left=("kind", "why"))


def _table(header: Sequence[str], rows: Iterable[str], left: Sequence[str]) -> str:
    cells = "".join(
        f"<th class='left'>{escape(h)}</th>" if h in left else f"<th>{escape(h)}</th>"
        for h in header
    )
    body = "".join(f"<tr>{r}</tr>" for r in rows)
    return f"<div class='wide'><table><tr>{cells}</tr>{body}</table></div>"


def _seconds(task: TaskExplanation) -> float | None:
    return None if task.latency_s is None else task.latency_s * task.weight


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
