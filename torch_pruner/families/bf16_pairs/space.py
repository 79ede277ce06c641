"""The space of bfloat16 products with AVX512-BF16, and what that of AMX shares with it.

Decisions: see ``form``.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.bf16_pairs.form import (
    COLUMNS,
    Bf16PairsDecisions,
    PairDecisions,
    is_half,
    pair_form,
    takes_pairs,
)
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols

if TYPE_CHECKING:
    from torch_pruner.task import Task

_COPIED_CYCLES = 0.25  # of an element that is copied
_ROUNDED_CYCLES = 0.5  # that is rounded, too
_WINDOW_CYCLES = 0.8  # that is of a convolution: there are more than a cache holds
_ALONE_CYCLES = 8.0  # that is in no whole vector of a row, or of a window's channels
_CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16)

P = TypeVar("P", bound=PairDecisions[Array])


class PairSketch(Sketch[P]):
    """What the two have in common."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.form = pair_form(task.spec, self.name)
        self.con = self.form.con

    @abstractmethod
    def _rows(self, c: P) -> Array:
        """Rows that are computed together."""

    @abstractmethod
    def _registers(self, c: P) -> Array: ...

    @abstractmethod
    def _block_cycles(self, c: P) -> tuple[Array, Array]:
        """(instructions, cycles) of the reduction of one block, operands in the first cache."""

    def _shared_domains(self) -> tuple[list[int], ...]:
        """Options of mc, order, ku, tasks and ahead."""
        threads, constant = self.task.threads, self.form.constant is not None
        chunks = [k for k in _CHUNKS if k <= self.con.rows] if constant else [1]
        order = [0, 1] if constant else [0]
        tasks = [1, threads, 4 * threads] if threads > 1 else [1]
        return chunks, order, [1, 2, 4], tasks, [0, 1] if constant else [0]

    def _fits_work(self, c: P) -> Mask:
        con = self.con
        blocks = np.ceil(con.n / (c.nv * COLUMNS))
        chunked = (c.mc == 1) | (c.mc <= np.ceil(con.rows / self._rows(c)))
        shared = (c.tasks == 1) | (con.groups * blocks * c.mc >= 2)
        serial = (c.tasks > 1) | (c.mc == 1)  # chunks only serve parallelism
        ordered = (c.order == 0) | (c.mc > 1)
        follows = (c.ahead == 0) | (con.groups * blocks > 1)  # there is a next panel
        narrow = (c.nv == 1) | ((c.nv - 1) * COLUMNS < con.n)
        result: Mask = chunked & shared & serial & ordered & follows & narrow
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, con, target = self.columns(decisions), self.con, self.task.target
        threads, form = self.task.threads, self.form
        rows, block = self._rows(c), c.nv * COLUMNS
        row_blocks, blocks = np.ceil(con.rows / rows), np.ceil(con.n / block)
        per_chunk = np.ceil(row_blocks / c.mc)
        units = con.groups * blocks * c.mc

        instructions, cycles = self._block_cycles(c)
        panel = 2.0 * form.depth * block
        held = panel + 2.0 * form.depth * rows
        near = held / machine.bytes_per_cycle(held, target)
        epilogue = rows * c.nv * (6 + self._epilogue())
        ragged = np.where(con.n % block == 0, 0.0, 6.0 * rows * block / blocks)
        block_cycles = np.maximum(cycles, near) + epilogue + ragged + 20

        # Constants come from memory: waiting for a panel is in part hidden by the work on it.
        shares = np.where(c.order == 0, c.mc, 1)
        if form.constant is not None:
            cold = panel / machine.memory_bytes_per_cycle(target) / shares
            exposed = cold * np.where(c.ahead == 1, 0.2, 0.6)
        else:
            exposed = form.depth * block * 0.5  # packing
        unit_s = (per_chunk * block_cycles + exposed) / target.frequency_hz
        tasks = np.minimum(c.tasks, units)
        task_s = np.ceil(units / tasks) * unit_s + self._task_cycles() / target.frequency_hz
        parallel = np.where(tasks > 1, 1, 0)
        seconds, rounds = machine.parallel_seconds(tasks, task_s, parallel, threads)
        if form.place is None:
            total = con.groups * con.rows * form.depth * self._copied_cycles()
            copied = total / np.minimum(tasks, threads)
            seconds = seconds + copied / target.frequency_hz + machine.LAUNCH_S * parallel
        weights = 2.0 * con.groups * con.n * con.depth
        # A core alone gets its share of what memory gives.
        rate = machine.memory_bytes_per_cycle(target) * target.frequency_hz
        cores = np.where(tasks > 1, target.cores, 1)
        floor = weights / rate / cores * float(form.constant is not None)
        launch = machine.LAUNCH_S * parallel
        a_bytes = 2.0 * con.rows * form.depth
        traffic = con.groups * (blocks * panel + np.where(c.order == 0, blocks, 1) * a_bytes)
        return Symbols(
            self._registers(c),
            instructions,
            held,
            tasks,
            traffic,
            rounds,
            block * 4,
            2.0 * con.groups * blocks * block * row_blocks * rows * form.depth,
            launch + machine.from_memory(seconds - launch, floor),
        )

    def default(self) -> Decisions:
        return self.best_predicted(20_000)

    def _task_cycles(self) -> float:
        return 0.0

    def _copied_cycles(self) -> float:
        """Of one element of the first operand's copy."""
        if is_half(self.task.spec, self.con.a):
            return _COPIED_CYCLES
        line = self.con.k[-1]
        alone = line % COLUMNS / line
        whole = _WINDOW_CYCLES if self.con.conv else _ROUNDED_CYCLES
        return whole * (1 - alone) + _ALONE_CYCLES * alone

    def _epilogue(self) -> float:
        after = set(range(self.con.anchor + 1, len(self.task.spec.nodes)))
        return machine.pointwise_cycles(self.task.spec, after)


class Bf16PairsSketch(PairSketch[Bf16PairsDecisions[Array]]):
    """Register tiles of float32 sums; one instruction adds 16 products of pairs."""

    name = "bf16_pairs"
    decisions = Bf16PairsDecisions

    @staticmethod
    def fits(task: Task) -> bool:
        target = task.target
        return target.bf16_dot and target.vector_bytes == 64 and takes_pairs(task.spec)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        rows = [t for t in range(1, 17) if t <= self.con.rows]
        columns = [v for v in (1, 2, 3, 4, 6) if v == 1 or (v - 1) * COLUMNS < self.con.n]
        every = (rows, columns, *self._shared_domains())
        return tuple(np.array(d, dtype=np.int64) for d in every)

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        result: Mask = (self._registers(c) <= self.task.target.vector_registers) & self._fits_work(
            c
        )
        return result

    def _rows(self, c: Bf16PairsDecisions[Array]) -> Array:
        return c.tm

    def _registers(self, c: Bf16PairsDecisions[Array]) -> Array:
        registers: Array = c.tm * c.nv + c.nv + 1
        return registers

    def _block_cycles(self, c: Bf16PairsDecisions[Array]) -> tuple[Array, Array]:
        target, pairs = self.task.target, self.form.depth / 2
        dots = c.tm * c.nv
        step = np.maximum(dots * target.bf16_dot_fmas / target.fma_per_cycle, machine.FMA_LATENCY)
        step = np.maximum(step, (c.tm + c.nv) / machine.LOADS_PER_CYCLE)
        return dots * pairs, pairs * (step + (0.5 + 0.5 * c.ahead) / c.ku)
