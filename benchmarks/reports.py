"""What the backend says about a compilation, as plain values for tables and JSON."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_pruner import Report

SOURCES = {
    "tuned": "tuned",
    "cache": "from the cache",
    "library": "from the library",
    "untuned": "untuned",
}


def last(backend: str) -> Report | None:
    """The report of the compilation just made, if our backend made it."""
    if not backend.startswith(("pruner", "metaschedule")):
        return None
    import torch_pruner

    return torch_pruner.last_report()


def dynamo_seconds() -> tuple[float, float]:
    """What Dynamo took for itself in this process so far, and all that compiling took with it."""
    from torch._dynamo.utils import compilation_time_metrics as spent

    whole = sum(spent.get("_compile.compile_inner", [0.0]))
    backend = sum(spent.get("OutputGraph.call_user_compiler", [0.0]))
    return whole - backend, whole


def summary(report: Report) -> dict[str, Any]:
    """The numbers that the tables show."""
    measured = [task for task in report.tasks if task.source != "cache"]
    return {
        "ops_total": report.ops_total,
        "ops_compiled": report.ops_compiled,
        "flops_total": report.flops_total,
        "flops_compiled": report.flops_compiled,
        "tasks": dict(Counter(task.source for task in report.tasks)),
        "candidates_measured": sum(task.trials for task in measured),
        "seconds": dict(report.seconds),
    }


def ops_share(of: dict[str, Any]) -> float:
    return of["ops_compiled"] / max(of["ops_total"], 1)


def flops_share(of: dict[str, Any]) -> float:
    return of["flops_compiled"] / of["flops_total"] if of["flops_total"] else 1.0


def describe(of: dict[str, Any]) -> list[str]:
    """One readable line each for kernels, operators and time."""
    counts = of["tasks"]
    kernels = ", ".join(f"{counts.get(kind, 0)} {text}" for kind, text in SOURCES.items())
    left = of["ops_total"] - of["ops_compiled"]
    phases = sorted(of["seconds"].items(), key=lambda item: -item[1])
    spent = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases if seconds >= 0.05)
    operators = f"{of['ops_compiled']} of {of['ops_total']} compiled, {left} left to eager"
    work = f"{100 * flops_share(of):.1f} % of the floating-point work compiled"
    return [
        f"kernels     {sum(counts.values())} kinds: {kernels}",
        f"operators   {operators}; {work}",
        f"seconds     {spent or 'less than 0.1 in all'}",
    ]
