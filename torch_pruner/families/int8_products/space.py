"""The space of products of bytes by constant bytes, with estimates.

The symbols are those of Pruner's Symbol-based Analyzer. Decisions: see ``form``.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.int8_products.form import (
    PAIRS,
    QUADS,
    Int8ProductsDecisions,
    int8_product,
)
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols

if TYPE_CHECKING:
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Task

_WAITING = 0.2  # share of the weights' way from memory in which nothing else happens
_COPIED_PER_CYCLE = 8.0  # elements of the first operand


def word_of(target: TargetSpec) -> int | None:
    """Numbers that an instruction of ``target`` sums; None where it is not known to have one."""
    if target.byte_dot:
        return QUADS
    return PAIRS if target.is_x86 else None


class Int8ProductsSketch(Sketch[Int8ProductsDecisions[Array]]):
    """See the module."""

    name = "int8_products"
    decisions = Int8ProductsDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        found, word = int8_product(task.spec), word_of(task.target)
        if found is None or word is None:
            raise ValueError("no product of bytes by constant bytes, or no instruction for it")
        self.found, self.con, self.word = found, found.con, word
        self.lanes = task.target.vector_bytes // 4

    @staticmethod
    def fits(task: Task) -> bool:
        return word_of(task.target) is not None and int8_product(task.spec) is not None

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        con, vectors = self.con, -(-self.con.n // self.lanes)
        rows = [t for t in range(1, 17) if t <= con.rows]
        columns = [v for v in (1, 2, 3, 4, 6) if v <= vectors]
        chunks = [c for c in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if c <= con.rows]
        parallel = [0, 1] if self.task.threads > 1 else [0]
        options = ([self.lanes], [self.word], rows, columns, chunks, parallel)
        return tuple(np.array(d, dtype=np.int64) for d in options)

    @property
    def _shifted(self) -> bool:
        return self.found.shifted(self.word, self.lanes)

    def _rows(self, c: Int8ProductsDecisions[Array]) -> Array:
        """Rows of a tile, with the one that sums columns."""
        rows: Array = c.tm + self._shifted
        return rows

    def _tasks(self, c: Int8ProductsDecisions[Array]) -> Array:
        tasks: Array = np.ceil(self.con.n / (c.nv * c.vl)) * c.mc
        return tasks

    def _registers(self, c: Int8ProductsDecisions[Array]) -> Array:
        used: Array = self._rows(c) * c.nv + c.nv + 1 + (self.word == PAIRS)
        return used

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        smallest = (c.tm == 1) & (c.nv == 1)
        fits = (self._registers(c) <= self.task.target.vector_registers) | smallest
        chunked = (c.mc == 1) | (c.mc <= self.con.row_tiles(c.tm))
        shared = (c.par == 0) | (self._tasks(c) >= 2)
        serial = (c.par == 1) | (c.mc == 1)  # chunks only serve parallelism
        result: Mask = fits & chunked & shared & serial
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, con, spec, target = self.columns(decisions), self.con, self.task.spec, self.task.target
        after = set(range(con.anchor + 1, len(spec.nodes)))
        depth, columns = self.found.depth(self.word), c.nv * c.vl
        written = c.tm * c.nv * (4 + machine.pointwise_cycles(spec, after)) + 20
        per_chunk = np.ceil(con.row_tiles(c.tm) / c.mc)
        panel = columns * con.depth * 1.0
        cold = panel / machine.memory_bytes_per_cycle(target) * _WAITING
        cycles = per_chunk * (depth * self._step_cycles(c) + written) + cold
        tasks = self._tasks(c)
        task_s = cycles / target.frequency_hz
        seconds, rounds = machine.parallel_seconds(tasks, task_s, c.par, self.task.threads)
        cores = np.where(c.par == 1, self.task.threads, 1)
        copied = con.rows * con.depth / _COPIED_PER_CYCLE / cores / target.frequency_hz
        seconds = seconds + copied + np.where(c.par == 1, machine.LAUNCH_S, 0.0)
        weights = float(con.n * con.depth)
        seconds = np.maximum(seconds, weights / target.dram_bytes_per_s + 0.03 * seconds)
        rows_bytes = con.rows * con.depth * 1.0
        return Symbols(
            self._registers(c),
            self._rows(c) * c.nv * 1.0,
            panel + c.tm * con.depth,
            tasks,
            (weights * c.mc + rows_bytes * np.ceil(con.n / columns)),
            rounds,
            columns * self.word * 1.0,
            2.0 * np.ceil(con.n / columns) * columns * con.row_tiles(c.tm) * c.tm * con.depth,
            seconds,
        )

    def _step_cycles(self, c: Int8ProductsDecisions[Array]) -> Array:
        """Cycles of one word of the reduction of a tile."""
        target = self.task.target
        sums = self._rows(c) * c.nv
        added = 0.0 if self.word == QUADS else sums + c.nv  # sums apart, and signs extended
        cycles = np.maximum(sums / target.fma_per_cycle, machine.FMA_LATENCY)
        cycles = np.maximum(cycles, (c.tm + c.nv) / machine.LOADS_PER_CYCLE)
        issued = sums + added + c.tm + c.nv + 1
        result: Array = np.maximum(cycles, issued / machine.ISSUED_PER_CYCLE) + 0.5
        return result

    def default(self) -> Decisions:
        return self.best_predicted(6_000)
