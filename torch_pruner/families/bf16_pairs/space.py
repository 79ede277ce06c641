"""The space of bfloat16 products with AVX512-BF16, and what that of AMX shares with it.

Decisions: see ``form``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.bf16_pairs.form import (
    COLUMNS,
    LINES,
    ROWS,
    Bf16PairsDecisions,
    PairDecisions,
    PairForm,
    is_half,
    pair_form,
    pairs_together,
    takes_pairs,
    turned,
    ways,
)
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.adjacency import columns_adjacent, kernels_together, rows_adjacent
from torch_pruner.graph.contraction import contraction_of
from torch_pruner.graph.strided import strided

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.task import Task

_COPIED_CYCLES = 0.25  # of an element that is copied
_TURNED_CYCLES = 0.6  # that is turned by squares
_ROUNDED_CYCLES = 0.5  # that is rounded, too
_WINDOW_CYCLES = 0.8  # that is of a convolution: there are more than a cache holds
_ALONE_CYCLES = 8.0  # that is in no whole vector of a row, or of a window's channels
_PACKED_CYCLES = 0.5  # of an element of a panel
_STRAY_CYCLES = 12.0  # of an element of a window whose channels are no neighbours
_SCATTERED_CYCLES = 1.5  # of a result that lies alone
_APART_CYCLES = 2.0  # whose columns are no neighbours
_CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16)

P = TypeVar("P", bound=PairDecisions[Array])


class PairSketch(Sketch[P]):
    """What the two have in common."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        options = ways(task.spec, self.name)
        self.forms = {way: pair_form(task.spec, self.name, way) for way in options}
        self.con = contraction_of(task.spec)
        some = next(iter(self.forms.values()))
        self.constant, self.packs_first = some.constant is not None, some.packs_first

    def _by_way(self, c: P, value: Callable[[PairForm], Array | float]) -> Array:
        """``value`` of each schedule's form."""
        result: Array = np.zeros(len(c.way))
        for way, form in self.forms.items():
            result = np.where(c.way == way, value(form), result)
        return result

    @abstractmethod
    def _rows(self, c: P) -> Array:
        """Rows that are computed together."""

    @abstractmethod
    def _row_blocks(self, c: P) -> Array:
        """Blocks of so many rows."""

    @abstractmethod
    def _registers(self, c: P) -> Array: ...

    @abstractmethod
    def _block_cycles(self, c: P) -> tuple[Array, Array]:
        """(instructions, cycles) of the reduction of one block, operands in the first cache."""

    def _shared_domains(self) -> tuple[list[int], ...]:
        """Options of mc, order, ku, tasks, ahead and way."""
        threads, early = self.task.threads, self.constant or self.packs_first
        chunks = [k for k in _CHUNKS if k <= self.con.rows] if early else [1]
        order = [0, 1] if early else [0]
        tasks = [1, threads, 4 * threads] if threads > 1 else [1]
        ahead = [0, 1] if self.constant else [0]
        return chunks, order, [1, 2, 4], tasks, ahead, list(self.forms)

    def _fits_work(self, c: P) -> Mask:
        con = self.con
        blocks = np.ceil(con.n / (c.nv * COLUMNS))
        chunked = (c.mc == 1) | (c.mc <= self._row_blocks(c))
        shared = (c.tasks == 1) | (con.groups * blocks * c.mc >= 2)
        serial = (c.tasks > 1) | (c.mc == 1)  # chunks only serve parallelism
        ordered = (c.order == 0) | (c.mc > 1)
        follows = (c.ahead == 0) | (con.groups * blocks > 1)  # there is a next panel
        narrow = (c.nv == 1) | ((c.nv - 1) * COLUMNS < con.n)
        result: Mask = chunked & shared & serial & ordered & follows & narrow
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, con, target = self.columns(decisions), self.con, self.task.target
        threads, depth = self.task.threads, self._by_way(c, lambda form: form.depth)
        rows, block = self._rows(c), c.nv * COLUMNS
        row_blocks, blocks = self._row_blocks(c), np.ceil(con.n / block)
        per_chunk = np.ceil(row_blocks / c.mc)
        units = con.groups * blocks * c.mc

        instructions, cycles = self._block_cycles(c)
        panel = 2.0 * depth * block
        held = panel + 2.0 * depth * rows
        near = held / machine.bytes_per_cycle(held, target)
        scattered = self._by_way(c, lambda form: form.planes is not None) * _SCATTERED_CYCLES
        epilogue = rows * c.nv * (6 + self._epilogue() + COLUMNS * scattered)
        ragged = np.where(con.n % block == 0, 0.0, 6.0 * rows * block / blocks)
        block_cycles = np.maximum(cycles, near) + epilogue + ragged + 20

        # Constants come from memory: waiting for a panel is in part hidden by the work on it.
        shares = np.where(c.order == 0, c.mc, 1)
        exposed = np.zeros(len(decisions))
        if self.constant:
            cold = panel / machine.memory_bytes_per_cycle(target) / shares
            exposed = cold * np.where(c.ahead == 1, 0.2, 0.6)
        elif not self.packs_first:
            exposed = depth * block * self._each_packed
        unit_s = (per_chunk * block_cycles + exposed) / target.frequency_hz
        tasks = np.minimum(c.tasks, units)
        task_s = np.ceil(units / tasks) * unit_s + self._task_cycles() / target.frequency_hz
        parallel = np.where(tasks > 1, 1, 0)
        seconds, rounds = machine.parallel_seconds(tasks, task_s, parallel, threads)
        copied = self._by_way(c, self._copying)
        before = copied + depth * con.groups * blocks * block * self._packing
        parts = 1.0 * (copied > 0) + self.packs_first
        seconds = seconds + before / np.minimum(tasks, threads) / target.frequency_hz
        seconds = seconds + parts * machine.LAUNCH_S * parallel
        weights = 2.0 * con.groups * con.n * con.depth
        # A core alone gets its share of what memory gives.
        rate = machine.memory_bytes_per_cycle(target) * target.frequency_hz
        cores = np.where(tasks > 1, target.cores, 1)
        floor = weights / rate / cores * float(self.constant)
        launch = machine.LAUNCH_S * parallel
        a_bytes = 2.0 * con.rows * depth
        traffic = con.groups * (blocks * panel + np.where(c.order == 0, blocks, 1) * a_bytes)
        return Symbols(
            self._registers(c),
            instructions,
            held,
            tasks,
            traffic,
            rounds,
            block * 4,
            2.0 * con.groups * blocks * block * row_blocks * rows * depth,
            launch + machine.from_memory(seconds - launch, floor),
        )

    def default(self) -> Decisions:
        return self.best_predicted(20_000)

    def _task_cycles(self) -> float:
        return 0.0

    @property
    def _packing(self) -> float:
        """Cycles of an element of the second operand's panels, where all are packed first."""
        return self._each_packed if self.packs_first else 0.0

    @cached_property
    def _each_packed(self) -> float:
        """Cycles of an element of a panel that is packed at each call."""
        spec, con = self.task.spec, self.con
        together = columns_adjacent(spec, con) or kernels_together(spec, con)
        if together or pairs_together(spec, con) is not None:
            return _PACKED_CYCLES
        return _APART_CYCLES

    def _copying(self, form: PairForm) -> float:
        """Cycles of the first operand's copy."""
        if form.place is not None:
            return 0.0
        spec, con = self.task.spec, self.con
        elements = float(math.prod(form.copy))
        if form.planes is not None:
            return elements * (_TURNED_CYCLES if con.m[0] >= COLUMNS else _APART_CYCLES)
        if form.way == LINES:
            return elements * _APART_CYCLES
        if con.conv is not None:
            place = strided(spec, con.a)
            if place is not None and place.strides[1] != 1:
                return elements * (_STRAY_CYCLES if form.way == ROWS else _APART_CYCLES)
        if con.conv is None and rows_adjacent(spec, con):
            return elements * (_TURNED_CYCLES if turned(spec, con) else _APART_CYCLES)
        if is_half(spec, con.a) and con.conv is None:
            return elements * _COPIED_CYCLES
        line = con.k[-1]
        alone = line % COLUMNS / line
        whole_cycles = _COPIED_CYCLES if is_half(spec, con.a) else _ROUNDED_CYCLES
        if con.conv is not None and form.way == ROWS:
            whole_cycles = _WINDOW_CYCLES
        return elements * (whole_cycles * (1 - alone) + _ALONE_CYCLES * alone)

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
        if not target.bf16_dot or target.vector_bytes != 64 or not takes_pairs(task.spec):
            return False
        return bool(ways(task.spec, "bf16_pairs"))

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        longest = max(form.extent for form in self.forms.values())
        rows = [t for t in range(1, 17) if t <= longest]
        columns = [v for v in (1, 2, 3, 4, 6) if v == 1 or (v - 1) * COLUMNS < self.con.n]
        every = (rows, columns, *self._shared_domains())
        return tuple(np.array(d, dtype=np.int64) for d in every)

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        held = self._registers(c) <= self.task.target.vector_registers
        short = c.tm <= self._by_way(c, lambda form: form.extent)
        result: Mask = held & short & self._fits_work(c)
        return result

    def _rows(self, c: Bf16PairsDecisions[Array]) -> Array:
        return c.tm

    def _row_blocks(self, c: Bf16PairsDecisions[Array]) -> Array:
        return self._by_way(c, lambda form: form.tiles(c.tm))

    def _registers(self, c: Bf16PairsDecisions[Array]) -> Array:
        registers: Array = c.tm * c.nv + c.nv + 1
        return registers

    def _block_cycles(self, c: Bf16PairsDecisions[Array]) -> tuple[Array, Array]:
        target, pairs = self.task.target, self._by_way(c, lambda form: form.depth) / 2
        dots = c.tm * c.nv
        step = np.maximum(dots * target.bf16_dot_fmas / target.fma_per_cycle, machine.FMA_LATENCY)
        step = np.maximum(step, (c.tm + c.nv) / machine.LOADS_PER_CYCLE)
        return dots * pairs, pairs * (step + (0.5 + 0.5 * c.ahead) / c.ku)
