"""What ``explain`` says: which graphs would be compiled, to which kernels, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch_pruner.text_tables import bytes_text, joules_text, time_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.report import OpFallback


@dataclass(frozen=True, slots=True)
class TaskExplanation:
    """One kernel that would run: its output shape, how often it is called, whether it is cached.

    What is cached has the kind of its schedule, and its seconds per call unless it was never timed.
    Tuning that was interrupted goes on from ``trials``. ``failed`` says which schedule went wrong
    when a worker ran it, and how, where that is why it is another's.

    ``finalists`` are the schedules among which the option ``objective`` chooses, as JSON:
    ``candidate``, ``latency_s``, ``packed_bytes``, ``constant_bytes``, ``scratch_bytes`` and
    ``joules``, None without a meter.

    Example:
        tasks = [t for g in torch_pruner.explain(model, (x,)).graphs for t in g.tasks]
        print([t.name for t in tasks if not t.cached])
    """

    name: str
    workload: str
    shape: str
    dtype: str
    weight: int
    flops: float
    cached: bool
    # For a missing kernel: the fields in which the nearest entry differs.
    differs: Mapping[str, tuple[object, object]]
    schedule: str = ""
    latency_s: float | None = None
    effort: str = ""  # that its tuning was completed with, for whatever is asked for now
    trials: int = 0  # candidates that were measured for it
    failed: str = ""
    finalists: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class GraphExplanation:
    """One captured graph: how much of it is compiled, and what is refused for which reason.

    Example:
        for graph in torch_pruner.explain(model, (x,)).graphs:
            for refused in graph.rejections:
                print(refused.node, refused.detail)
    """

    name: str
    ops_total: int
    ops_compiled: int
    flops_total: int
    flops_compiled: int
    partitions: tuple[str, ...]
    tasks: tuple[TaskExplanation, ...]
    rejections: tuple[OpFallback, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What ``torch.compile(model, backend="pruner")`` would do with these inputs.

    Example:
        print(torch_pruner.explain(model, (x,)).graphs[0].partitions)
    """

    graphs: tuple[GraphExplanation, ...]

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def __str__(self) -> str:
        lines: list[str] = []
        for g in self.graphs:
            share = 100 * g.flops_compiled / g.flops_total if g.flops_total else 100.0
            lines.append(
                f"{g.name}: {g.ops_compiled} of {g.ops_total} operators compiled "
                f"({share:.1f} % of the FLOPs)"
            )
            lines.extend(f"  {p}" for p in g.partitions)
            lines.append(f"  {'kernel':<46} {'shape':>20} {'calls':>6} {'MFLOP':>10}  cached")
            lines.extend(
                f"  {t.name[:46]:<46} {t.shape:>20} {t.weight:>6} {t.flops / 1e6:>10.1f}"
                f"  {'yes' if t.cached else 'no'}"
                for t in sorted(g.tasks, key=lambda t: -t.flops * t.weight)
            )
            lines.extend(f"  {t.name}: {t.failed}" for t in g.tasks if t.failed)
            lines.extend(
                f"  {t.name}: {'; '.join(_finalist(f) for f in t.finalists)}"
                for t in g.tasks
                if len(t.finalists) > 1
            )
            lines.extend(f"  left to eager: {r.node}: {r.kind}: {r.detail}" for r in g.rejections)
        return "\n".join(lines)


def _finalist(found: Mapping[str, Any]) -> str:
    """One schedule and what it costs."""
    size = bytes_text(found["packed_bytes"] + found["scratch_bytes"])
    costs = [time_text(found["latency_s"]), size]
    costs += [joules_text(found["joules"])] if found["joules"] is not None else []
    return f"{found['candidate']['sketch']} {', '.join(costs)}"
