"""Other ways to cut a graph that was tuned into kernels, the most promising first.

Every decision that rules take (``graph/cuts.py``) has another way. What a program would take is
estimated as the sum of its kernels' drafts, each as it is in a program, after which threads meet
(Pruner's symbols; ``one_kernel.draft_seconds``). Estimates are right within a tenth or so, and
rules were measured: so whoever can call the network measures the best few as programs, and says
which it keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch_pruner.compiler import kernels
from torch_pruner.compiler.building.kept import KeptKernels, Scratch
from torch_pruner.compiler.one_kernel import draft_seconds
from torch_pruner.compiler.remembered.cuts import remember_cuts
from torch_pruner.graph.cuts import STAGES
from torch_pruner.graph.fuse import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch_pruner.compiler.choice import Choice
    from torch_pruner.compiler.compiled import CompiledGraph
    from torch_pruner.compiler.driver import Compiler
    from torch_pruner.compiler.lowered import Lowered
    from torch_pruner.graph.cuts import Cuts, Site
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.layout import Order
    from torch_pruner.task import Task

ABOUT = 1.05  # times the estimate of what is there: a program that is expected to take longer loses
LEAST = 0.02  # of a program's estimate is in the kernels at a site: else nobody would see it
FEW = 4  # alternatives that are measured, of those of a stage
NEW = 6  # kernels that nobody knows, in one of them
TRIALS = 8  # candidates of each of those


@dataclass(frozen=True, slots=True)
class Alternative:
    """The other way at ``sites`` of a graph cut as ``base``: ``ratio`` is the estimate of such a
    program over that of what is there."""

    base: Cuts
    sites: frozenset[Site]
    lowered: Lowered
    ratio: float

    @property
    def cuts(self) -> Cuts:
        return self.lowered.cuts

    @property
    def kind(self) -> str:
        """Of its sites."""
        return next(iter(self.sites)).kind


@dataclass(slots=True, eq=False)
class Recut:
    """One graph as ``compiler`` compiled it, and how else it can be cut.

    ``lowered`` and ``choices`` are what is best so far, ``changed`` whether it is cut otherwise
    than it was.
    """

    compiler: Compiler
    graph: Graph
    inputs: Sequence[Order]
    outputs: Sequence[Order]
    lowered: Lowered
    choices: dict[str, Choice]
    changed: bool = False
    _seconds: dict[str, float] = field(default_factory=dict)
    _scratch: Scratch | None = None

    @staticmethod
    def of(
        compiler: Compiler,
        graph: Graph,
        inputs: Sequence[Order],
        outputs: Sequence[Order],
        choices: Mapping[str, Choice],
    ) -> Recut | None:
        """None where what was compiled is not what would be cut now."""
        lowered = compiler.lower(graph, inputs, outputs)
        if any(task.workload not in choices for task in lowered.tasks):
            return None
        return Recut(compiler, graph, inputs, outputs, lowered, dict(choices))

    def promising(self, kinds: Collection[str], goes_on: Callable[[], bool]) -> list[Alternative]:
        """A few alternatives of these ``kinds``, of one stage (``graph.cuts.STAGES``): those that
        are expected to take the least time, these first.

        None is thought of that has not been when ``goes_on`` says no.
        """
        found: list[Alternative] = []
        tried = {_kernels(self.lowered)}
        for sites in self._alike(kinds):
            if not goes_on():
                break
            other = self.with_sites(sites)
            if (name := _kernels(other.lowered)) in tried:
                continue
            tried.add(name)
            unknown = sum(t.workload not in self.choices for t in other.lowered.tasks)
            if other.ratio <= ABOUT and unknown <= NEW:
                found.append(other)
        return sorted(found, key=lambda other: other.ratio)[:FEW]

    def with_sites(self, sites: frozenset[Site]) -> Alternative:
        """The other way at ``sites``; all else as it is now."""
        base = self.lowered.cuts
        compiler = replace(self.compiler, cuts=base ^ sites)
        lowered = compiler.lower(self.graph, self.inputs, self.outputs)
        ratio = self.estimate_s(lowered) / self.estimate_s(self.lowered)
        return Alternative(base, sites, lowered, ratio)

    def estimate_s(self, lowered: Lowered) -> float:
        """Seconds of all kernels of a program, as their drafts are predicted."""
        return math.fsum(self._kernel_s(t) * t.weight for t in lowered.tasks)

    def _kernel_s(self, task: Task) -> float:
        if task.workload not in self._seconds:
            context = self.compiler.context
            kernel = Kernel(task.spec, (), ())
            self._seconds[task.workload] = draft_seconds(kernel, context.target, context.threads)
        return self._seconds[task.workload]

    def _alike(self, kinds: Collection[str]) -> list[frozenset[Site]]:
        """Sites that are decided together, the longest first: as layers of a network are alike;
        those of products that are split or joined all at once."""
        whole, nodes = self.estimate_s(self.lowered), self.lowered.fused.graph.nodes
        fused = set(kinds) <= set(STAGES[-1])  # named by nodes of the graph that kernels are of
        groups: dict[tuple[object, ...], set[Site]] = {}
        spent: dict[tuple[object, ...], float] = {}
        at = self._kernel_of() if fused else {}
        by_workload = {task.workload: task for task in self.lowered.tasks}
        for site in self.lowered.sites:
            if site.kind not in kinds:
                continue
            key: tuple[object, ...] = (site.kind,)
            if fused:
                node, workload = nodes[site.node], at.get(site.node, "")
                key = (site.kind, node.op, node.shape, workload)
                seconds = self._kernel_s(by_workload[workload]) if workload else 0.0
                spent[key] = spent.get(key, 0.0) + seconds
            groups.setdefault(key, set()).add(site)
        order = sorted(groups, key=lambda key: -spent.get(key, whole))
        return [frozenset(groups[k]) for k in order if spent.get(k, whole) >= LEAST * whole]

    def _kernel_of(self) -> dict[int, str]:
        """The workload of a kernel that computes each node: the first that reads nothing of it."""
        fused = self.lowered.fused
        found: dict[int, str] = {}
        for kernel, workload in zip(fused.kernels, self.lowered.workloads, strict=True):
            stack, given = list(kernel.outputs), set(kernel.inputs)
            while stack:
                i = stack.pop()
                if i in found or i in given:
                    continue
                found[i] = workload
                stack.extend(fused.graph.nodes[i].inputs)
        return found

    def chosen(self, other: Alternative) -> dict[str, Choice]:
        """Schedules of all kernels of an alternative: those that nobody knows are tuned a little.

        Raises what tuning raises.
        """
        c = self.compiler
        known = {t.workload for t in other.lowered.tasks} & set(self.choices)
        new = [t for t in other.lowered.tasks if t.workload not in known]
        if not new:
            return {w: self.choices[w] for w in known}
        config = c.config.replace(trials=TRIALS * len(new), time_budget_s=None)
        stored = kernels.look_up(other.lowered.tasks, config, c.store, c.context)
        beside = [t for t in other.lowered.tasks if t.workload in known & set(stored)]
        own = (config, c.store, c.context, c.vendor, c.timer)
        found = kernels.choose([*new, *beside], *own, executor=c.executor)
        return found | {w: self.choices[w] for w in known}

    def compiled(self, other: Alternative, choices: Mapping[str, Choice]) -> CompiledGraph:
        """An alternative as a program, to be looked at and not kept. Raises ``CompileError``."""
        if self._scratch is None:
            self._scratch = Scratch(KeptKernels(self.compiler.store, self.compiler.context))
        compiler = replace(self.compiler, scratch=self._scratch, cuts=other.cuts)
        return compiler.linked(other.lowered, choices)

    def take(self, other: Alternative, choices: Mapping[str, Choice]) -> None:
        """From now on this is what is best."""
        self.lowered, self.choices, self.changed = other.lowered, dict(choices), True

    def keep(self) -> CompiledGraph:
        """What is best, which later processes find. Raises ``CompileError``."""
        cuts = self.lowered.cuts
        if self._scratch is not None:
            self._scratch.taken(self.lowered.scheduled(self.choices))
        made = replace(self.compiler, cuts=cuts).linked(self.lowered, self.choices)
        remember_cuts(self.compiler, self.graph, self.inputs, self.outputs, cuts)
        return made


def _kernels(lowered: Lowered) -> tuple[str, ...]:
    """What two cuts that give the same program have in common."""
    return tuple(lowered.workloads)
