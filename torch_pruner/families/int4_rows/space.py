"""The space of products of few rows with weights of four bits, with estimates.

The symbols are those of Pruner's Symbol-based Analyzer. Decisions: see ``form``.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.int4_rows.form import (
    MAX_ROWS,
    PART_WORDS,
    QUAD_LANES,
    TABLE_BYTES,
    Int4Product,
    Int4RowsDecisions,
    copies,
    int4_product,
)
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.nibbles import CONVERTED, DIGITS, IN_MANTISSA, LOOKED_UP

if TYPE_CHECKING:
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Task

_STREAM = 4096.0  # bytes of a panel that are read before its stream is known
_PAIR_BYTES = 32  # of vectors whose bytes AVX2 multiplies
_MASKS = 10  # registers with masks and powers of two, and what is made with them
_CUT = 3.0  # cycles until a number of the first operand is three digits
_WAITING, _FETCHED = 0.15, 0.1  # share of the stream's time in which nothing else happens


def has_table(target: TargetSpec) -> bool:
    """Whether a vector register holds a float for each of sixteen numbers."""
    return target.vector_bytes == TABLE_BYTES


def _has_digits(task: Task, found: Int4Product) -> bool:
    """Whether the first operand may be fixed point: an instruction multiplies four bytes, or two.

    Of AVX-512 not where whole vectors are multiplied twice a cycle: floats keep up with memory.
    """
    target = task.target
    quads = target.byte_dot and target.vector_bytes == TABLE_BYTES and target.fma_per_cycle < 2
    able = target.is_x86 and (quads or target.vector_bytes == _PAIR_BYTES)
    plain = not found.offsets and found.bits == 4 and found.group % 16 == 0
    return able and plain and not copies(task.spec, found.con)


class Int4RowsSketch(Sketch[Int4RowsDecisions[Array]]):
    """See the module."""

    name = "int4_rows"
    decisions = Int4RowsDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        found = int4_product(task.spec)
        if found is None:
            raise ValueError("no product with constant weights of four bits")
        self.found, self.con = found, found.con
        self.lanes = max(2, task.target.vector_bytes // 4)
        self.stored = found.stored_bytes(task.spec)
        self.quads = self.lanes == QUAD_LANES

    @staticmethod
    def fits(task: Task) -> bool:
        found = int4_product(task.spec)
        return found is not None and found.con.rows <= MAX_ROWS

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        vectors = -(-self.con.n // self.lanes)
        several = [v for v in (1, 2, 3, 4, 6, 8) if v <= vectors]
        early = [1] if self.found.offsets else [0, 1]
        ways = [LOOKED_UP, IN_MANTISSA] if has_table(self.task.target) else [CONVERTED, IN_MANTISSA]
        if _has_digits(self.task, self.found):
            ways.append(DIGITS)
        table = ways if self.found.bits == 4 else [CONVERTED]
        parallel = [0, 1] if self.task.threads > 1 else [0]
        options = ([self.lanes], several, [1, 2], early, table, [0, 2048, 4096], parallel)
        return tuple(np.array(d, dtype=np.int64) for d in options)

    def _tasks(self, c: Int4RowsDecisions[Array]) -> Array:
        tasks: Array = np.ceil(self.con.n / (c.nv * c.vl))
        return tasks

    def _registers(self, c: Int4RowsDecisions[Array]) -> Array:
        tiles = self.con.rows * c.nv
        used: Array = tiles * (c.split + (c.early == 0)) + c.nv + c.nv * (c.early == 1) + 2
        digits = tiles * 4 + 2 * c.nv + 4  # three sums and a total, nibbles and masks
        used = np.where(c.table == DIGITS, digits, used)
        return used + np.where(c.table == IN_MANTISSA, _MASKS, 0)

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        smallest = (c.nv == 1) & (c.split == 1) & (c.early == 1)
        fits = (self._registers(c) <= self.task.target.vector_registers) | smallest
        fits &= (c.table != DIGITS) | ((c.split == 1) & (c.early == 0))
        result: Mask = fits & ((c.par == 0) | (self._tasks(c) >= 2))
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, con, spec, target = self.columns(decisions), self.con, self.task.spec, self.task.target
        ones, depth = np.ones(len(decisions)), con.k[-1]
        after = set(range(con.anchor + 1, len(spec.nodes)))
        written = con.rows * c.nv * (4 + machine.pointwise_cycles(spec, after))
        folds = np.where(c.early == 0, np.ceil(depth / self.found.group), 1)
        fold = con.rows * c.nv * (c.split + 1) + c.nv * 2
        busy = np.ceil(depth / self.found.per_word) * self._word_cycles(c) + folds * fold + written
        columns = c.nv * self.lanes
        panel = columns * depth * self.stored
        cold = panel / machine.memory_bytes_per_cycle(target)
        waiting = np.where(c.ahead > 0, _FETCHED, _WAITING) + np.minimum(0.4, _STREAM / panel)
        task_s = (busy + cold * waiting) / target.frequency_hz
        tasks = self._tasks(c)
        seconds, rounds = machine.parallel_seconds(tasks, task_s, c.par, self.task.threads)
        made = np.where(c.table == DIGITS, con.rows * depth * _CUT, 0.0)  # by every thread
        seconds = seconds + made / target.frequency_hz
        if copies(spec, con):
            seconds = seconds + con.rows * depth / 4.0 / target.frequency_hz
        weights = con.n * depth * self.stored
        seconds = np.maximum(seconds, weights / target.dram_bytes_per_s + 0.03 * seconds)
        rows_bytes = con.rows * depth * 4.0
        return Symbols(
            self._registers(c),
            con.rows * c.nv * self.found.per_word,
            panel + rows_bytes,
            tasks,
            (weights + rows_bytes) * ones,
            rounds,
            columns * 4.0,
            2.0 * tasks * columns * con.rows * depth,
            seconds,
        )

    def _word_cycles(self, c: Int4RowsDecisions[Array]) -> Array:
        """Cycles of a row of words of a panel."""
        target, rows, each = self.task.target, self.con.rows, self.found.per_word
        fmas = each * rows * c.nv
        vectors = each * c.nv
        looked_up = c.table == LOOKED_UP
        widened = vectors * (np.where(looked_up, 2.0, 3.0) + (c.early == 1))
        shared = np.where(c.nv > 1, each * rows, 0.0)  # else a part of the product
        fetched = np.where(c.ahead > 0, c.nv * self.lanes / 16, 0.0)
        issued = fmas + widened + shared + c.nv + fetched + 2
        latency = each / c.split * machine.FMA_LATENCY
        # Shifts and permutations have half of the units that the other instructions have.
        units = np.where(looked_up, 2.0 * vectors, (2.0 * vectors + fmas) / 2)
        cycles = np.maximum(np.maximum(fmas, units) / target.fma_per_cycle, latency)
        loads = (each * rows + c.nv + fetched) / machine.LOADS_PER_CYCLE
        result: Array = np.maximum(np.maximum(cycles, loads), issued / machine.ISSUED_PER_CYCLE)
        return np.where(c.table == DIGITS, self._digit_cycles(c, fetched), result)

    def _digit_cycles(self, c: Int4RowsDecisions[Array], fetched: Array) -> Array:
        """The same with digits of the rows in place of floats."""
        target, rows = self.task.target, self.con.rows
        dots = 6.0 * rows * c.nv  # three digits of a number, two halves of a word
        units = np.maximum(dots, (dots + 3 * c.nv) / 2) / target.fma_per_cycle
        issued = dots + 4.0 * c.nv + fetched + 2
        if not self.quads:  # pairs are added by an instruction of their own, digits broadcast
            issued = issued + dots + 6.0 * rows
            # of the words of a part: three vectors of sums become one of floats
            issued = issued + (9.0 * rows + 3.0) * c.nv / PART_WORDS
        result: Array = np.maximum(units, issued / machine.ISSUED_PER_CYCLE)
        return result

    def default(self) -> Decisions:
        return self.best_predicted(6_000)
