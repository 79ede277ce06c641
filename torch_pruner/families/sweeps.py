"""What the spaces of kernels that sweep over memory share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.layout import innermost_position, position_below
from torch_pruner.graph.ops import ITEMSIZE, OpKind

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.rows import RowDomain
    from torch_pruner.task import Task

N_co = TypeVar("N_co", covariant=True)

PLACES = ("argmax", "argmin")  # widened to int64 only as they are stored
_PER_THREAD = (1, 2, 4, 16)  # parallel tasks for each thread
# Measured on gradients of batch normalisation: a vector of a row whose elements lie lines apart.
GATHERED_CYCLES = 3.0  # of each of its elements, read or written


class SweepDecisions(Protocol[N_co]):
    """The decisions that all sweeps have."""

    @property
    def chunk(self) -> N_co:
        """Steps of a parallel task."""

    @property
    def par(self) -> N_co:
        """1: tasks in parallel."""


S = TypeVar("S", bound=SweepDecisions[Array])


class Sweep(Sketch[S]):
    """The parts that all sweeps share: steps, and how tasks share them out."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.vl = lanes_of(task)

    @property
    def steps(self) -> int:
        """Vectors (or rows) that parallel tasks share out."""
        return max(1, self._steps())

    def _steps(self) -> int:
        shape = self.task.spec.nodes[self.task.spec.outputs[0]].shape
        return math.prod(shape) // self.vl

    def _moved(self) -> float:
        """Bytes read and written."""
        return machine.read_bytes(self.task.spec) + machine.output_bytes(self.task.spec)

    def _chunks(self) -> list[int]:
        threads = self.task.threads
        return sorted({max(1, -(-self.steps // (threads * k))) for k in _PER_THREAD})

    def _parallel(self) -> list[int]:
        return [0, 1] if self.task.threads > 1 and self.steps > 1 else [0]

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        result: Mask = (c.par == 1) | (c.chunk == int(max(self._chunks())))
        return result

    def default(self) -> Decisions:
        return self.best_predicted()

    def _estimate(
        self, decisions: Decisions, cycles_per_step: Array | float, steps: float, work: float
    ) -> Symbols:
        target, threads = self.task.target, self.task.threads
        c = self.columns(decisions)
        moved = self._moved()
        tasks = np.where(c.par == 1, np.ceil(steps / c.chunk), 1.0)
        share = np.where(c.par == 1, c.chunk, steps)
        bandwidth = machine.bytes_per_cycle(np.full(len(decisions), moved), target)
        memory = share / max(steps, 1) * moved / bandwidth
        task_s = np.maximum(share * cycles_per_step, memory) / target.frequency_hz
        seconds, rounds = machine.parallel_seconds(tasks, task_s, c.par, threads)
        full = np.ones(len(decisions))
        return Symbols(
            full, full * cycles_per_step, full * moved / max(steps, 1), tasks, full * moved, rounds,
            full * target.vector_bytes, full * work, seconds,
        )  # fmt: skip


def whole_nodes(spec: Graph, rows: RowDomain) -> set[int]:
    """The nodes that have a value for every element of every row."""
    size = rows.rows * rows.width
    return {i for i, node in enumerate(spec.nodes) if node.numel == size}


def lanes_of(task: Task) -> int:
    nodes, positions = task.spec.nodes, _positions_alone(task.spec)
    ends = (*(i for i in task.spec.inputs if i not in positions), *task.spec.outputs)
    ends = tuple(i for i in ends if nodes[i].op not in PLACES)
    item = max((ITEMSIZE[nodes[i].dtype] for i in ends), default=4)
    return max(1, task.target.vector_bytes // max(item, 4))


def _positions_alone(spec: Graph) -> set[int]:
    """Nodes of which nothing is computed but where something lies: a number for a vector."""
    found: set[int] = set()
    users = spec.users()
    for i in reversed(range(len(spec.nodes))):
        if i in spec.outputs or not users[i]:
            continue
        if all(u in found or i in _named(spec, u) for u in users[i]):
            found.add(i)
    return found


def _named(spec: Graph, node: int) -> tuple[int, ...]:
    """Operands that say where the node finds or puts what lies next to each other."""
    n = spec.nodes[node]
    if n.kind is OpKind.UPDATE:
        named, inner = n.inputs[2:], n.attr("dim") + len(n.inputs) - 2
    elif n.op == "take":
        named, inner = n.inputs[1:], n.attr("dim") + 1
    else:
        return ()
    data = n.inputs[: len(n.inputs) - len(named)]
    inside = inner < len(spec.nodes[n.inputs[0]].shape)
    return named if inside and not set(data) & set(named) else ()


def innermost(spec: Graph, reduction: int) -> int:
    return innermost_axis(spec, spec.nodes[reduction].inputs[0])


def inner_axis_kept(spec: Graph) -> bool:
    """Whether the axis that lies innermost in memory survives the (first) reduction."""
    for node in spec.nodes:
        if node.kind is OpKind.WINDOW:
            source = node.inputs[0]
            inner = innermost_axis(spec, source)
            return inner < len(spec.nodes[source].shape) - len(node.attr("kernel"))
        if node.kind is OpKind.REDUCE:
            return innermost_axis(spec, node.inputs[0]) not in node.attr("axes")
    return True


def innermost_axis(spec: Graph, node: int) -> int:
    """The axis of ``node`` along which most of what it is made of, as large as itself, is
    contiguous in memory; the last one where nothing is."""
    votes: dict[int, int] = {}
    start: list[int] = list(range(len(spec.nodes[node].shape)))
    ways, seen = [(node, start)], set[tuple[int, tuple[int, ...]]]()
    while ways:
        at, position = ways.pop()
        if (key := (at, tuple(position))) in seen:
            continue
        seen.add(key)
        n = spec.nodes[at]
        if n.op == "input":
            axis = innermost_position(n.shape, position)
            if axis is not None:
                votes[axis] = votes.get(axis, 0) + n.numel * ITEMSIZE[n.dtype]
        elif n.op == "broadcast" and spec.nodes[n.inputs[0]].numel < n.numel:
            continue
        elif n.op in ("permute", "reshape"):
            below = spec.nodes[n.inputs[0]].shape
            ways.append((n.inputs[0], position_below(n, below, position)))
        elif n.kind in (OpKind.VIEW, OpKind.POINTWISE, OpKind.INJECTIVE):
            ways += [(i, position) for i in n.inputs if len(spec.nodes[i].shape) == len(position)]
    return max(votes, key=lambda axis: votes[axis]) if votes else len(start) - 1
