"""The space of rows that are neighbours in memory: a lane each."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.lane_per_row.form import LanePerRowDecisions
from torch_pruner.families.space import Array, Decisions, Sketch, Symbols
from torch_pruner.families.sweeps import (
    innermost,
    lanes_of,
    whole_nodes,
)
from torch_pruner.graph.rows import full_node, passes, row_domain

if TYPE_CHECKING:
    from torch_pruner.task import Task


class LanePerRowSketch(Sketch[LanePerRowDecisions[Array]]):
    """Rows that are neighbours in memory, each reduced by a lane of its own; ``nv`` vectors of them
    make a task."""

    name = "lane_per_row"
    decisions = LanePerRowDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.rows = row_domain(task.spec)
        self.vl = lanes_of(task)

    @staticmethod
    def fits(task: Task) -> bool:
        spec = task.spec
        if any(n.op.startswith("arg") for n in spec.nodes):
            return False
        rows = row_domain(spec)
        lined_up = bool(rows.kept) and innermost(task.spec, rows.reductions[0]) == rows.kept[-1]
        return lined_up and rows.shape[rows.kept[-1]] >= lanes_of(task)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        across = self.rows.shape[self.rows.kept[-1]]
        vectors = [n for n in (1, 2, 4) if n * self.vl <= across]
        parallel = [0, 1] if self.task.threads > 1 and across > self.vl else [0]
        return tuple(np.array(d, dtype=np.int64) for d in ([self.vl], vectors, parallel))

    def default(self) -> Decisions:
        return self.best_predicted()

    def symbols(self, decisions: Decisions) -> Symbols:
        task, rows, spec = self.task, self.rows, self.task.spec
        c, target = self.columns(decisions), task.target
        vectors, parallel = c.nv, c.par
        sweeps = len(passes(spec))
        wide = any(full_node(spec, o, rows.shape) is not None for o in spec.outputs)
        whole = whole_nodes(spec, rows)
        ops = machine.pointwise_cycles(spec, whole) + sum(i in whole for i in spec.inputs)
        chain = np.maximum(machine.FMA_LATENCY, vectors * (len(rows.reductions) + ops))
        tasks = np.ceil(rows.rows / (vectors * self.vl))
        moved = machine.input_bytes(spec) * (sweeps + wide) + machine.output_bytes(spec)
        cycles = rows.width * (sweeps * chain + wide * vectors * (ops + 1.0))
        bandwidth = machine.bytes_per_cycle(np.full(len(decisions), moved), target)
        task_s = np.maximum(cycles, moved / tasks / bandwidth) / target.frequency_hz
        seconds, rounds = machine.parallel_seconds(tasks, task_s, parallel, task.threads)
        full = np.ones(len(decisions))
        return Symbols(
            vectors * len(rows.reductions), cycles, full * moved / tasks, tasks, full * moved,
            rounds, vectors * target.vector_bytes, full * rows.rows * rows.width * sweeps, seconds,
        )  # fmt: skip
