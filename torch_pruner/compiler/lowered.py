"""A graph that was cut into kernels, and what follows from the schedules of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.graph.cuts import NO_CUTS
from torch_pruner.task import Scheduled, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.compiler.choice import Choice
    from torch_pruner.graph.cuts import Cuts, Site
    from torch_pruner.graph.fuse import FusedGraph
    from torch_pruner.graph.hoist import Hoisted
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.layout import Order


@dataclass(slots=True)
class Lowered:
    """A fused graph and its distinct kernels."""

    hoisted: Hoisted
    fused: FusedGraph
    tasks: list[Task]
    workloads: list[str]  # of each kernel, in order
    past_caches: frozenset[str]  # see ``graph.streamed``
    cuts: Cuts = NO_CUTS  # how it was cut, and
    sites: tuple[Site, ...] = ()  # where it could have been cut otherwise

    def scheduled(self, choices: Mapping[str, Choice]) -> dict[str, Scheduled]:
        """The distinct kernels with their decisions, by workload."""
        return {
            t.workload: Scheduled(
                t.spec, choices[t.workload].candidate, t.workload in self.past_caches
            )
            for t in self.tasks
        }

    def one_pass(self, choices: Mapping[str, Choice]) -> list[int]:
        """Positions of kernels that compute every element of their results once."""
        names = [choices[workload].sketch for workload in self.workloads]
        return [k for k, name in enumerate(names) if families.named(name).one_pass]

    def segments(self, choices: Mapping[str, Choice]) -> list[int | tuple[int, ...]]:
        """Runs of generated kernels (tuples), vendor kernels (their position), in order."""
        result: list[int | tuple[int, ...]] = []
        run: list[int] = []
        for k, workload in enumerate(self.workloads):
            if not families.named(choices[workload].sketch).generated:
                if run:
                    result.append(tuple(run))
                    run = []
                result.append(k)
            else:
                run.append(k)
        if run:
            result.append(tuple(run))
        return result


def demanded(graph: Graph, inputs: Sequence[Order], outputs: Sequence[Order]) -> dict[int, Order]:
    """The memory order of each end of ``graph``; prepared inputs, which come last, lie in order.

    An output that several are is made as the first of them, and an input lies as it was given even
    where it is an output, too.
    """
    fixed: dict[int, Order] = {}
    for i, order in zip(graph.outputs, outputs, strict=True):
        fixed.setdefault(i, tuple(order))
    for i in graph.inputs[len(inputs) :]:
        fixed.pop(i, None)
    return fixed | {i: tuple(o) for i, o in zip(graph.inputs, inputs, strict=False)}
