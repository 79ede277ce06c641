"""How scheduled kernels take their turns in a program: what the draft model says of each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner import families
from torch_pruner.families import machine
from torch_pruner.graph.phases import Manner, Turn, plan_phases

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.fuse import FusedGraph
    from torch_pruner.task import Candidate, Task


COPIED_BYTES_PER_CYCLE = 16.0  # of scratch that a kernel makes first, or reads last


def turns_of(
    fused: FusedGraph,
    workloads: Sequence[str],
    scheduled: Mapping[str, tuple[Task, Candidate]],
    threads: int,
) -> tuple[Turn, ...] | None:
    """When each kernel of ``fused`` runs and who repeats it; None: one after the other.

    ``scheduled``: by workload. Needs no TVM, and says the same in every process.
    """
    if threads < 2:
        return None
    manners = {w: _manner(task, candidate) for w, (task, candidate) in scheduled.items()}
    return plan_phases(fused, [manners[w] for w in workloads], threads, machine.BARRIER_S)


def _manner(task: Task, candidate: Candidate) -> Manner:
    family, decisions = families.named(candidate.sketch), dict(candidate.decisions)
    if not family.generated:
        return Manner(serial=False, apart=True)
    typed, serial = family.typed(decisions), family.serial(decisions)
    division = family.division(task.spec, typed)
    scratch = sum(s.nbytes for s in family.parameters(task.spec, typed).scratch)
    scratch_s = scratch / COPIED_BYTES_PER_CYCLE / task.target.frequency_hz
    begins = not serial and family.copies_first(task.spec, typed)
    ends = not serial and family.combines_last(task.spec, typed)
    alone_s, repeated_s = 0.0, math.inf
    if "par" in decisions and (serial or not _is_large(task)):
        alone_s, repeated_s = _seconds(task, family.space()(task), decisions, serial=serial)
    return Manner(
        serial,
        alone_s,
        repeated_s,
        prologue_s=scratch_s if begins else math.inf,
        epilogue_s=scratch_s if ends else math.inf,
        division=division,
    )


def _is_large(task: Task) -> bool:
    """Whether a kernel that threads share moves so much that each should not do all of it."""
    moved = machine.read_bytes(task.spec) + machine.output_bytes(task.spec)
    return moved > task.target.l1_bytes


def _seconds(
    task: Task, sketch: Sketch, decisions: Mapping[str, int], *, serial: bool
) -> tuple[float, float]:
    """Estimated seconds of a kernel as it is scheduled, and where every thread does all of it."""
    point = np.array([[decisions[name] for name in sketch.names]], dtype=np.int64)
    symbols = sketch.symbols(point)
    tasks, rounds = float(symbols.s4_tasks[0]), float(symbols.s6_rounds[0])
    launch_s = 0.0 if serial else machine.LAUNCH_S
    alone_s = float(symbols.latency_s[0]) - launch_s
    work_s = alone_s if serial else alone_s / rounds * tasks
    read = _from_memory(task, float(symbols.s5_traffic_bytes[0])) * task.threads
    return alone_s, max(work_s, read / task.target.dram_bytes_per_s)


def _from_memory(task: Task, moved: float) -> float:
    """Bytes that every thread reads or writes for itself where all of them do a kernel: parameters,
    which other kernels have driven out of the caches, and what does not stay in the first one."""
    if moved > task.target.l1_bytes:
        return moved
    inputs = [task.spec.nodes[i] for i in task.spec.inputs]
    return min(moved, float(sum(node.nbytes for node in inputs if node.attr("static"))))
