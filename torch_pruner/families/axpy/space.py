"""The space of products that add up rows of their second operand where they lie, with estimates.

The symbols are those of Pruner's Symbol-based Analyzer. Decisions: see ``form``.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.axpy.form import AxpyDecisions
from torch_pruner.families.in_place.form import axpy_of
from torch_pruner.families.in_place.space import WORTH
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.strided import strided

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.task import Task

_ADDED = 1024  # sums onto one at most: longer ones lose digits
_ROWS_AT_ONCE = 16
_LINE = 64.0  # bytes
_STREAM = 64.0  # bytes of a row that are read before its stream is known


class AxpySketch(Sketch[AxpyDecisions[Array]]):
    """See the module. What is read is never packed, constant or not."""

    name = "axpy"
    decisions = AxpyDecisions
    packs = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        con = axpy_of(task.spec)
        if con is None:
            raise ValueError("no product of few rows with neighbouring columns")
        self.con = con
        self.itemsize = ITEMSIZE[con.acc_dtype]
        self.lanes = _lanes(task, con)
        self.vectors = con.n // self.lanes

    @staticmethod
    def fits(task: Task) -> bool:
        con = axpy_of(task.spec)
        if con is None or con.n % _lanes(task, con):
            return False
        return con.depth <= _ADDED * _ROWS_AT_ONCE

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        together = [u for u in (1, 2, 4, 8, _ROWS_AT_ONCE) if u <= self.con.depth]
        chunks = [v for v in range(1, self.vectors + 1) if self.vectors % v == 0]
        parallel = [0, 1] if self.task.threads > 1 else [0]
        ahead = [0] if strided(self.task.spec, self.con.b) is None else [0, 1]
        options = ([self.lanes], together, chunks, ahead, parallel)
        return tuple(np.array(d, dtype=np.int64) for d in options)

    def _held(self, c: AxpyDecisions[Array]) -> Array:
        """Bytes of the sums of a chunk."""
        held: Array = self.con.rows * c.cv * self.lanes * self.itemsize
        return held

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        tasks = self.con.groups * self.vectors / c.cv
        near = (self._held(c) <= self.task.target.l1_bytes / 2) | (c.cv == 1)
        exact = np.ceil(self.con.depth / c.ku) <= _ADDED
        result: Mask = near & exact & ((c.par == 0) | (tasks >= 2))
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, con, spec, target = self.columns(decisions), self.con, self.task.spec, self.task.target
        size, ones = ITEMSIZE[spec.nodes[con.b].dtype], np.ones(len(decisions))
        steps = np.ceil(con.depth / c.ku)
        after = set(range(con.anchor + 1, len(spec.nodes)))
        vector = steps * self._step_cycles(c)
        vector = vector + con.rows * (4 + machine.pointwise_cycles(spec, after))
        tasks = con.groups * self.vectors / c.cv
        run = c.cv * self.lanes * size
        cold = run * con.depth / machine.memory_bytes_per_cycle(target)
        busy = c.cv * vector + steps * (con.rows * c.ku + 10) + 100
        cycles = machine.from_memory(busy, cold) + cold * self._waiting(c, run)
        task_s = cycles / target.frequency_hz
        seconds, rounds = machine.parallel_seconds(tasks, task_s, c.par, self.task.threads)
        weights = float(con.groups * con.n * con.depth * size)
        rows_bytes = con.groups * con.rows * con.depth * self.itemsize
        return Symbols(
            con.rows * c.ku + 3.0,
            con.rows * c.ku,
            self._held(c),
            tasks,
            weights + rows_bytes * self.vectors / c.cv,
            rounds,
            run,
            2.0 * con.groups * con.rows * con.n * con.depth * ones,
            WORTH * seconds,
        )

    def _waiting(self, c: AxpyDecisions[Array], run: Array) -> Array:
        """Time for which nothing happens, as a share of what a streaming read takes.

        Measured on a Zen 5. Rows of the weight are as many streams as pass at a time, which the
        processor follows by itself as long as little is done with each line.
        """
        second = self.task.spec.nodes[self.con.b].dtype
        more, narrow = self.con.rows - 1, self.itemsize / ITEMSIZE[second] - 1
        alone = 0.2 * more + 0.12 * narrow**2
        waiting: Array = np.where(c.ahead > 0, 0.05 + 0.1 * more + 0.08 * narrow, alone)
        return waiting + 0.02 + np.minimum(0.3, _STREAM / run)

    def _step_cycles(self, c: AxpyDecisions[Array]) -> Array:
        """Cycles of one vector of columns in one step: rows times their elements, and the sums."""
        con, target = self.con, self.task.target
        second = self.task.spec.nodes[con.b].dtype
        fmas = con.rows * (c.ku + 1)
        kept = target.vector_registers - 6  # elements of the first operand in registers
        again = np.maximum(0, con.rows * c.ku - kept)
        loads = c.ku + con.rows + again
        lines = c.ahead * c.ku * self.lanes * ITEMSIZE[second] / _LINE
        widened = {"bfloat16": 1.5, "float16": 1.0, "int8": 2.5}.get(second, 0.0) * c.ku
        cycles = np.maximum(fmas / target.fma_per_cycle, (loads + lines) / machine.LOADS_PER_CYCLE)
        issued = fmas + loads + lines + widened + con.rows + 2
        result: Array = np.maximum(cycles, issued / machine.ISSUED_PER_CYCLE)
        return result

    def default(self) -> Decisions:
        return self.best_predicted(6_000)


def _lanes(task: Task, con: Contraction) -> int:
    return max(2, task.target.vector_bytes // ITEMSIZE[con.acc_dtype])
