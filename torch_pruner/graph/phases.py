"""Which kernels of a program run between the same two barriers, and which every thread repeats.

In: kernels in order and how each is scheduled. Out: a ``Turn`` for each. Threads meet after every
phase. Kernels of one phase do not depend on each other, with three exceptions: a thread may go on
with what it made itself, be it all of a small kernel that every thread repeats into memory of its
own, the work of the one thread that has serial kernels, or the columns that are its share of two
products. What is cheaper is chosen by the draft model's estimates; the order stays. No TVM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.updates import writes_in_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.graph.fuse import FusedGraph
    from torch_pruner.graph.ir import Graph, Node


@dataclass(frozen=True, slots=True)
class Turn:
    """When a kernel runs, and which of it every thread does for itself.

    ``everywhere``: all of it. ``prologue``: its first part. ``epilogue``: its last part, after a
    barrier: the others are of the phase before. ``more``: the first thread that does a task more
    where tasks cannot be divided evenly.
    """

    phase: int
    everywhere: bool = False
    prologue: bool = False
    epilogue: bool = False
    more: int = 0


@dataclass(frozen=True, slots=True)
class Division:
    """Task ``p`` of ``tasks`` writes columns ``[p * width, (p + 1) * width)`` of the output, of all
    its rows, and nothing else."""

    tasks: int
    width: int


@dataclass(frozen=True, slots=True)
class Manner:
    """How a kernel is scheduled, as far as its turn depends on it.

    ``serial``: one thread does it. ``alone_s``: estimated seconds as it is scheduled, without a
    launch. ``repeated_s``: where all threads do all of it at once; infinite for what they must not.
    ``prologue_s``: of the first part on one thread, where that makes the kernel's scratch and
    nothing else does; ``epilogue_s``: of the last, where that makes the outputs of scratch and
    nothing else does. ``apart``: it is no part of a launch with others.
    """

    serial: bool
    alone_s: float = 0.0
    repeated_s: float = math.inf
    prologue_s: float = math.inf
    epilogue_s: float = math.inf
    apart: bool = False
    division: Division | None = None


def plan_phases(
    fused: FusedGraph, manners: Sequence[Manner], threads: int, barrier_s: float
) -> tuple[Turn, ...]:
    """The turn of every kernel; ``barrier_s``: seconds that a meeting of the threads takes."""
    maker = {o: k for k, kernel in enumerate(fused.kernels) for o in kernel.outputs}
    whole, ends = _repeated(fused, manners, threads, barrier_s)
    turns: list[Turn] = []
    phase = more = 0
    for k, (kernel, manner) in enumerate(zip(fused.kernels, manners, strict=True)):
        before = [
            d
            for d in {maker[i] for i in kernel.inputs if i in maker}
            if turns[d].phase == phase
            and not (whole[d] or ends[d])
            and not (manner.serial and manners[d].serial and not whole[k])
        ]
        alike = {turns[d].more for d in before}
        goes_on = not whole[k] and len(alike) == 1
        goes_on = goes_on and all(_same_share(fused, manners, (d, k), threads) for d in before)
        split = k > 0 and (manner.apart or manners[k - 1].apart)
        if split or (before and not goes_on):
            phase, more = phase + 1, 0
        first = alike.pop() if before and goes_on and not split else more
        if not whole[k] and manner.division is not None:
            more = (more + manner.division.tasks) % threads
        begins = _saved_s(manner.prologue_s, threads, barrier_s) > 0
        if ends[k]:
            phase, more = phase + 1, 0
        turns.append(Turn(phase, whole[k], begins and not (whole[k] or ends[k]), ends[k], first))
    return tuple(turns)


def _saved_s(part_s: float, threads: int, barrier_s: float) -> float:
    """What is saved where every thread does a part, rather than a share of it before a barrier."""
    return barrier_s + part_s / threads - part_s if math.isfinite(part_s) else -math.inf


def _repeated(
    fused: FusedGraph, manners: Sequence[Manner], threads: int, barrier_s: float
) -> tuple[list[bool], list[bool]]:
    """Which kernels every thread does, and of which it does the last part: of those that tasks of
    all threads read, where it is cheaper.

    Else one thread does them, or all do a share, and there is a barrier more.
    """
    kept = {o for o in fused.graph.outputs if not _writes_one_row(fused.graph, o)}
    users: dict[int, list[int]] = {}
    for k, kernel in enumerate(fused.kernels):
        for i in kernel.inputs:
            users.setdefault(i, []).append(k)
    whole, ends = [False] * len(manners), [False] * len(manners)
    for k in reversed(range(len(manners))):
        manner, outputs = manners[k], fused.kernels[k].outputs
        readers = {r for o in outputs for r in users.get(o, ())}
        wanted = any(not manners[r].serial or whole[r] for r in readers)
        if wanted and not manner.apart and not kept.intersection(outputs):
            whole[k] = manner.repeated_s < manner.alone_s + barrier_s
            ends[k] = not whole[k] and _saved_s(manner.epilogue_s, threads, barrier_s) > 0
    return whole, ends


def _writes_one_row(graph: Graph, output: int) -> bool:
    """Whether a node only writes rows into an input, each place once: all threads may do so.

    A thread reads what it wrote, and what the others write there later is the same.
    """
    node = graph.nodes[output]
    return writes_in_place(node) and graph.nodes[node.inputs[2]].numel == 1


def _same_share(
    fused: FusedGraph, manners: Sequence[Manner], pair: tuple[int, int], threads: int
) -> bool:
    """Whether each thread's share of the second kernel reads only its own share of the first."""
    first, second = (manners[k].division for k in pair)
    if first is None or second is None:
        return False
    even = not first.tasks % threads and not second.tasks % threads
    if first.tasks * first.width != second.tasks * second.width or not (even or first == second):
        return False
    before, after = (fused.kernels[k] for k in pair)
    read = [p for p, i in enumerate(after.inputs) if i in before.outputs]
    return all(
        _stays_in_place(spec, source)
        for spec, sources in (
            (before.spec, _products(before.spec)),
            (after.spec, [*_products(after.spec), *(after.spec.inputs[p] for p in read)]),
        )
        for source in sources
    )


def _products(spec: Graph) -> list[int]:
    return [i for i, n in enumerate(spec.nodes) if n.kind is OpKind.CONTRACT]


def _stays_in_place(spec: Graph, source: int) -> bool:
    """Whether what is computed from a value has each element where the value has it in memory."""
    reach = {source}
    for i, node in enumerate(spec.nodes):
        if reach.intersection(node.inputs):
            if node.numel != spec.nodes[source].numel or not _keeps_places(spec, node):
                return False
            reach.add(i)
    return True


def _keeps_places(spec: Graph, node: Node) -> bool:
    """Whether elements stay where they are in memory: elementwise, or another shape for it."""
    if node.op == "permute":
        source = spec.nodes[node.inputs[0]].shape
        moved = [p for p in node.attr("perm") if source[p] != 1]
        return moved == sorted(moved)
    return node.kind is OpKind.POINTWISE or node.op == "reshape"
