"""What one or more compilations did: values, their JSON, and their text for people.

In: numbers that the compiler and the backend collect. Out: ``Report``, the table that ``print``
shows, and the one line that is logged. Knows neither torch nor TVM. Times are seconds in values
and in JSON; text shows us, ms or s.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from torch_pruner.log import PHASES
from torch_pruner.report import text as text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Source = Literal["tuned", "library", "cache", "untuned"]
# When two graphs share a kernel, the merged task shows the first of these that applies.
SOURCES: tuple[Source, ...] = ("tuned", "library", "cache", "untuned")


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One kernel. ``workload`` is its digest, ``digest`` that of the schedule it got.

    ``latency_before_s`` is of what the kernel replaces; a latency is None where nothing was timed.
    ``trials`` counts the candidates measured for it, before this compilation too; ``effort`` is
    what its tuning was completed with, "none" where a draft was to do.

    Example:
        for task in torch_pruner.last_report().tasks:
            print(task.name, task.source, task.latency_after_s, task.sketch)
    """

    name: str
    workload: str
    weight: int
    flops: float
    source: Source
    latency_before_s: float | None
    latency_after_s: float | None
    trials: int
    digest: str
    sketch: str = ""
    effort: str = ""

    @property
    def tuned(self) -> bool:
        """Whether it is the result of a search, of this compilation or of one before."""
        if self.source == "cache":
            return self.effort != "none"
        return self.source != "untuned"

    @property
    def gain(self) -> float | None:
        """How many times faster the kernel became, where both latencies are known."""
        if self.latency_before_s is None or not self.latency_after_s:
            return None
        return self.latency_before_s / self.latency_after_s

    def merge(self, other: TaskReport) -> TaskReport:
        """The same kernel in two graphs: weights add, the better source is shown."""
        best, rest = sorted((self, other), key=lambda t: SOURCES.index(t.source))
        before = rest.latency_before_s if best.latency_before_s is None else best.latency_before_s
        after = rest.latency_after_s if best.latency_after_s is None else best.latency_after_s
        weight, trials = self.weight + other.weight, max(self.trials, other.trials)
        return replace(
            best, weight=weight, trials=trials, latency_before_s=before, latency_after_s=after
        )


@dataclass(frozen=True, slots=True)
class OpFallback:
    """An operator left to the fallback: which, the kind of reason, and the reason in words.

    Example:
        for graph in torch_pruner.last_report().graphs:
            print([(op.node, op.kind, op.detail) for op in graph.ops_fallback])
    """

    node: str
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Tuning:
    """How one search went; ``strategy`` names the cost model, too.

    Each point: seconds since it began, trials, and seconds that the best schedules so far take in
    one call of the graph, from when every kernel was timed.
    """

    strategy: str
    points: tuple[tuple[float, int, float], ...]


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph. ``weight_bytes`` is held by packed copies of weights,
    ``workspace_bytes`` by buffers between kernels. ``barriers``: how often the threads meet between
    kernels in a call, kernels that share a phase taken together. ``runs`` says what calls run in
    now, "eager", "drafted" or "tuned", and ``pending`` what is compiled in the background to take
    over, "" where nothing is.

    Example:
        for graph in torch_pruner.last_report().graphs:
            print(graph.name, f"{graph.ops_compiled} of {graph.ops_total} operators")
    """

    name: str
    ops_total: int
    ops_compiled: int
    flops_total: float
    flops_compiled: float
    regions: int
    ops_fallback: tuple[OpFallback, ...] = ()
    tasks: tuple[TaskReport, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    trials: int = 0
    notes: tuple[str, ...] = ()
    weight_bytes: int = 0
    workspace_bytes: int = 0
    tunings: tuple[Tuning, ...] = ()
    barriers: int = 0
    runs: str = ""
    pending: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(replace(self, seconds=_phases([self.seconds])))


@dataclass(frozen=True, slots=True)
class Report:
    """What compiling did, graph by graph; the properties are sums over ``graphs``.

    ``dynamo_s``: seconds that torch took for the same functions outside of us, to trace them and to
    build guards; None where torch does not tell. AOTAutograd's tracing is ``seconds["capture"]``.

    Example:
        report = torch_pruner.tune(model, (x,))
        print(report.sources, report.seconds)
        Path("report.json").write_text(json.dumps(report.to_json()))
    """

    graphs: tuple[GraphReport, ...] = ()
    dynamo_s: float | None = None

    @property
    def ops_total(self) -> int:
        return sum(g.ops_total for g in self.graphs)

    @property
    def ops_compiled(self) -> int:
        return sum(g.ops_compiled for g in self.graphs)

    @property
    def ops_fallback(self) -> tuple[OpFallback, ...]:
        return tuple(f for g in self.graphs for f in g.ops_fallback)

    @property
    def flops_total(self) -> float:
        return sum(g.flops_total for g in self.graphs)

    @property
    def flops_compiled(self) -> float:
        return sum(g.flops_compiled for g in self.graphs)

    @property
    def tasks(self) -> tuple[TaskReport, ...]:
        """Every distinct kernel once, in the order of first use."""
        merged: dict[str, TaskReport] = {}
        for task in (t for g in self.graphs for t in g.tasks):
            known = merged.get(task.workload)
            merged[task.workload] = task if known is None else known.merge(task)
        return tuple(merged.values())

    @property
    def sources(self) -> dict[str, int]:
        """Number of distinct kernels by source, every source present."""
        found = [t.source for t in self.tasks]
        return {source: found.count(source) for source in SOURCES}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, every phase present."""
        return _phases(g.seconds for g in self.graphs)

    @property
    def trials(self) -> int:
        return sum(g.trials for g in self.graphs)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for g in self.graphs for n in g.notes))

    @property
    def weight_bytes(self) -> int:
        return sum(g.weight_bytes for g in self.graphs)

    @property
    def workspace_bytes(self) -> int:
        return sum(g.workspace_bytes for g in self.graphs)

    @property
    def barriers(self) -> int:
        return sum(g.barriers for g in self.graphs)

    @property
    def tunings(self) -> tuple[Tuning, ...]:
        """Searches one after the other."""
        return tuple(t for g in self.graphs for t in g.tunings)

    @property
    def complete(self) -> bool:
        """Whether every graph was compiled, with no operator left to the fallback and no kernel
        untuned. A graph that eager runs as a whole has no operators, and a note that says why."""
        compiled = bool(self.graphs) and all(g.ops_total for g in self.graphs)
        return compiled and not self.ops_fallback and all(t.tuned for t in self.tasks)

    def to_json(self) -> dict[str, Any]:
        """The graphs, and the sums over them under the same names as the properties."""
        return {
            "ops_total": self.ops_total,
            "ops_compiled": self.ops_compiled,
            "ops_fallback": [asdict(f) for f in self.ops_fallback],
            "flops_total": self.flops_total,
            "flops_compiled": self.flops_compiled,
            "tasks": [asdict(t) for t in self.tasks],
            "sources": self.sources,
            "seconds": self.seconds,
            "dynamo_s": self.dynamo_s,
            "trials": self.trials,
            "notes": list(self.notes),
            "weight_bytes": self.weight_bytes,
            "workspace_bytes": self.workspace_bytes,
            "barriers": self.barriers,
            "tunings": [asdict(t) for t in self.tunings],
            "graphs": [g.to_json() for g in self.graphs],
        }

    def summary(self) -> str:
        """The line that is logged for every compilation."""
        count, phases = self.sources, self.seconds
        spent = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
        left = self.ops_total - self.ops_compiled
        return (
            f"{self.ops_compiled} of {self.ops_total} operators compiled, {left} left to the"
            f" fallback; kernels: {count['tuned']} tuned, {count['cache']} from cache,"
            f" {count['library']} from the library, {count['untuned']} untuned;"
            f" {self.trials} trials; {sum(phases.values()):.2f} s ({spent})"
        )

    def __str__(self) -> str:
        return text_of.text(self)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return text_of.html(self)


def _phases(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total = dict.fromkeys(PHASES, 0.0)
    for part in parts:
        for name, seconds in part.items():
            total[name] += seconds
    return total
