"""The spaces of kernels that sweep over memory: elementwise, columns and rows."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.graph.ops import ITEMSIZE, OpKind
from torch_pruner.graph.rows import RowDomain, full_node, passes, row_domain
from torch_pruner.tuner.sketch import machine
from torch_pruner.tuner.sketch.base import Array, Decisions, Mask, Sketch, Symbols

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph
    from torch_pruner.task import Task

_PER_THREAD = (1, 2, 4, 16)  # parallel tasks for each thread
# Measured on gradients of batch normalisation: a vector of a row whose elements lie lines apart.
_GATHERED_CYCLES = 3.0  # of each of its elements, read or written


class _Sweep(Sketch):
    """Shared by all: vectors of ``vl`` lanes, ``chunk`` steps per parallel task, ``par``."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.vl = _lanes(task)

    @property
    def steps(self) -> int:
        """Vectors (or rows) that parallel tasks share out."""
        return max(1, self._steps())

    def _steps(self) -> int:
        shape = self.task.spec.nodes[self.task.spec.outputs[0]].shape
        return math.prod(shape) // self.vl

    def _chunks(self) -> list[int]:
        threads = self.task.threads
        return sorted({max(1, -(-self.steps // (threads * k))) for k in _PER_THREAD})

    def _parallel(self) -> list[int]:
        return [0, 1] if self.task.threads > 1 and self.steps > 1 else [0]

    def valid(self, decisions: Decisions) -> Mask:
        chunk, par = decisions[:, self.names.index("chunk")], decisions[:, self.names.index("par")]
        result: Mask = (par == 1) | (chunk == int(max(self._chunks())))
        return result

    def default(self) -> Decisions:
        return self.best_predicted()

    def _estimate(
        self, decisions: Decisions, cycles_per_step: Array | float, steps: float, work: float
    ) -> Symbols:
        target, threads, spec = self.task.target, self.task.threads, self.task.spec
        chunk = decisions[:, self.names.index("chunk")].astype(np.float64)
        par = decisions[:, self.names.index("par")]
        moved = machine.input_bytes(spec) + machine.output_bytes(spec)
        tasks = np.where(par == 1, np.ceil(steps / chunk), 1.0)
        share = np.where(par == 1, chunk, steps)
        bandwidth = machine.bytes_per_cycle(np.full(len(decisions), moved), target)
        memory = share / max(steps, 1) * moved / bandwidth
        task_s = np.maximum(share * cycles_per_step, memory) / target.frequency_hz
        seconds, rounds = machine.parallel_seconds(tasks, task_s, par, threads)
        full = np.ones(len(decisions))
        return Symbols(
            full, full * cycles_per_step, full * moved / max(steps, 1), tasks, full * moved, rounds,
            full * target.vector_bytes, full * work, seconds,
        )  # fmt: skip


class InjectiveSketch(_Sweep):
    """Kernels without a reduction."""

    name = "injective"
    names = ("vl", "chunk", "par")

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        return tuple(
            np.array(d, dtype=np.int64) for d in ([self.vl], self._chunks(), self._parallel())
        )

    def symbols(self, decisions: Decisions) -> Symbols:
        spec = self.task.spec
        cycles = (
            1.0 + machine.pointwise_cycles(spec, set(range(len(spec.nodes)))) + len(spec.inputs)
        )
        return self._estimate(decisions, cycles, self.steps, spec.nodes[spec.outputs[0]].numel)


class ColumnsSketch(_Sweep):
    """Every output element has its own accumulator; the output's innermost axis is vectorised."""

    name = "columns"
    names = ("vl", "chunk", "par")

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        return tuple(
            np.array(d, dtype=np.int64) for d in ([self.vl], self._chunks(), self._parallel())
        )

    def symbols(self, decisions: Decisions) -> Symbols:
        spec = self.task.spec
        depth = 0.0
        for node in spec.nodes:
            if node.kind is OpKind.WINDOW:
                depth += math.prod(node.attr("kernel"))
            elif node.kind is OpKind.REDUCE:
                source = spec.nodes[node.inputs[0]].shape
                depth += math.prod(source[a] for a in node.attr("axes"))
        per_element = 1.0 + machine.pointwise_cycles(spec, set(range(len(spec.nodes))))
        gather = 1.0 if _inner_axis_kept(self.task) else self.vl * 1.0
        cycles = depth * max(machine.FMA_LATENCY, per_element) * gather
        return self._estimate(
            decisions, cycles, self.steps, depth * spec.nodes[spec.outputs[0]].numel
        )


class RowsSketch(_Sweep):
    """Rows reduced by vector lanes; ``lanes`` vectors accumulate side by side."""

    name = "rows"
    names = ("vl", "lanes", "chunk", "par")

    @cached_property
    def rows(self) -> RowDomain:
        return row_domain(self.task.spec)

    def _steps(self) -> int:
        return self.rows.rows

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        width = self.rows.shape[self.rows.axes[-1]]
        lanes = [n for n in (1, 2, 4) if n * self.vl <= width] or [1]
        return tuple(
            np.array(d, dtype=np.int64)
            for d in ([self.vl], lanes, self._chunks(), self._parallel())
        )

    def symbols(self, decisions: Decisions) -> Symbols:
        spec, rows = self.task.spec, self.rows
        lanes = decisions[:, 1].astype(np.float64)
        vectors = math.ceil(rows.width / self.vl)
        ops = machine.pointwise_cycles(spec, set(range(len(spec.nodes))))
        folds = len(rows.reductions)
        across = _inner_axis_kept(self.task) and len(rows.axes) < len(rows.shape)
        gather = self.vl * 1.0 if across else 1.0
        serial = folds * np.maximum(machine.FMA_LATENCY / lanes, 1.0) * gather
        tail = folds * (10 + lanes * self.vl)
        scalar_rest = (rows.shape[rows.axes[-1]] % self.vl) * (folds + ops) / max(vectors, 1)
        whole = _whole(spec, rows)
        reads, writes = (sum(i in whole for i in ends) for ends in (spec.inputs, spec.outputs))
        touched = (reads * len(passes(spec)) + writes) * self.vl if across else 0.0
        each = ops + serial + 2 + touched * _GATHERED_CYCLES
        cycles = vectors * each + tail + scalar_rest
        return self._estimate(decisions, cycles, self.steps, float(rows.rows * rows.width * folds))


class AbreastSketch(Sketch):
    """Rows that are neighbours in memory, each reduced by a lane of its own; ``nv`` vectors of them
    make a task."""

    name = "abreast"
    names = ("vl", "nv", "par")

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.rows = row_domain(task.spec)
        self.vl = _lanes(task)

    @staticmethod
    def fits(task: Task) -> bool:
        spec = task.spec
        if any(n.op.startswith("arg") for n in spec.nodes):
            return False
        rows = row_domain(spec)
        lined_up = bool(rows.kept) and _innermost(task, rows.reductions[0]) == rows.kept[-1]
        return lined_up and not rows.kept_values and rows.shape[rows.kept[-1]] >= _lanes(task)

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
        target, vectors = task.target, decisions[:, 1].astype(np.float64)
        parallel = decisions[:, 2]
        sweeps = len(passes(spec))
        wide = any(full_node(spec, o, rows.shape) is not None for o in spec.outputs)
        whole = _whole(spec, rows)
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


def _whole(spec: Graph, rows: RowDomain) -> set[int]:
    """The nodes that have a value for every element of every row."""
    size = rows.rows * rows.width
    return {i for i, node in enumerate(spec.nodes) if node.numel == size}


def _lanes(task: Task) -> int:
    nodes, ends = task.spec.nodes, (*task.spec.inputs, *task.spec.outputs)
    item = max((ITEMSIZE[nodes[i].dtype] for i in ends), default=4)
    return max(1, task.target.vector_bytes // max(item, 4))


def _innermost(task: Task, reduction: int) -> int:
    return innermost_axis(task, task.spec.nodes[reduction].inputs[0])


def _inner_axis_kept(task: Task) -> bool:
    """Whether the axis that lies innermost in memory survives the (first) reduction."""
    spec = task.spec
    for node in spec.nodes:
        if node.kind is OpKind.WINDOW:
            source = node.inputs[0]
            inner = innermost_axis(task, source)
            return inner < len(spec.nodes[source].shape) - len(node.attr("kernel"))
        if node.kind is OpKind.REDUCE:
            return innermost_axis(task, node.inputs[0]) not in node.attr("axes")
    return True


def innermost_axis(task: Task, node: int) -> int:
    """The axis of ``node`` along which its (largest) operand is contiguous in memory."""
    spec = task.spec
    shape = spec.nodes[node].shape
    position: list[int] = list(
        range(len(shape))
    )  # axis of the visited node -> axis of the start, -1 where lost
    at = node
    while spec.nodes[at].inputs:
        n = spec.nodes[at]
        child = max(n.inputs, key=lambda j: spec.nodes[j].numel)
        source = spec.nodes[child].shape
        if n.op == "permute":
            moved = [-1] * len(source)
            for k, p in enumerate(n.attr("perm")):
                moved[p] = position[k]
            position = moved
        elif len(source) != len(n.shape):
            break
        at = child
    real = [position[k] for k, d in enumerate(spec.nodes[at].shape) if d > 1 and k < len(position)]
    return real[-1] if real and real[-1] >= 0 else len(shape) - 1
