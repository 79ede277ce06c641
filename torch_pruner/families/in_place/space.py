"""The space of products of few rows that read their second operand where it lies, with estimates.

It lies along the reduction. The symbols are those of Pruner's Symbol-based Analyzer. Decisions: see
``form``.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.in_place.form import InPlaceDecisions, format_of, in_place_of
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.strided import strided

if TYPE_CHECKING:
    from torch_pruner.task import Task

_ACROSS_CYCLES = 2.0  # of a step that adds half of a vector to the other
_COLUMN_CYCLES = 10.0  # to begin and end the sums of some columns
_STREAM = 512.0  # bytes of a column that are read before its stream is known
# A copy of what is read once would have to be kept and compared with what it was made from.
WORTH = 0.97


class InPlaceSketch(Sketch[InPlaceDecisions[Array]]):
    """See the module. What is read is never packed, constant or not."""

    name = "in_place"
    decisions = InPlaceDecisions
    packs = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        found = in_place_of(task.spec)
        if found is None:
            raise ValueError("no product of few rows with a second operand along the reduction")
        self.found, self.con = found, found.con
        self.format = format_of(task.spec, found.con)
        self.lanes = max(2, task.target.vector_bytes // ITEMSIZE[self.con.acc_dtype])
        self.blocks = -(-self.con.n // self.lanes)

    @staticmethod
    def fits(task: Task) -> bool:
        return in_place_of(task.spec) is not None

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        vectors = max(1, self.con.k[-1] // self.lanes)
        several = [v for v in (1, 2, 4, 8) if v <= vectors]
        together = [c for c in (1, 2, 4, 8) if c <= min(self.lanes, self.con.n)]
        blocks = [b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) if b <= self.blocks]
        ahead = [0] if strided(self.task.spec, self.con.b) is None else [0, 2048, 4096, 8192]
        parallel = [0, 1] if self.task.threads > 1 else [0]
        options = ([self.lanes], several, together, blocks, ahead, parallel)
        return tuple(np.array(d, dtype=np.int64) for d in options)

    def _tasks(self, c: InPlaceDecisions[Array]) -> Array:
        tasks: Array = self.con.groups * np.ceil(self.blocks / c.nb)
        return tasks

    def valid(self, decisions: Decisions) -> Mask:
        c, rows = self.columns(decisions), self.con.rows
        used = rows * c.nc * c.nv + c.nc + 1
        smallest = (c.nv == 1) & (c.nc == 1)
        fits = (used <= self.task.target.vector_registers) | smallest
        shared = np.where(c.par == 1, self._tasks(c) >= 2, c.nb == 1)
        either = (c.nc == 1) | np.isin(c.ahead, (0, 4096))  # of several: no distance
        result: Mask = fits & shared & either
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, con, spec, target = self.columns(decisions), self.con, self.task.spec, self.task.target
        size, acc = self.format.itemsize, ITEMSIZE[con.acc_dtype]
        ones, depth = np.ones(len(decisions)), con.k[-1]
        tiles = con.rows * c.nc
        registers = tiles * c.nv + c.nc + 1  # S1

        steps = np.ceil(depth / (c.nv * self.lanes))
        step = self._step_cycles(c)
        across = tiles * np.log2(self.lanes) * _ACROSS_CYCLES + tiles * c.nv
        columns = steps * step + across + _COLUMN_CYCLES
        after = set(range(con.anchor + 1, len(spec.nodes)))
        written = con.rows * (4 + machine.pointwise_cycles(spec, after))
        block = np.minimum(self.lanes, con.n) / c.nc * columns + written

        tasks = self._tasks(c)
        cold = self.lanes * depth * size / machine.memory_bytes_per_cycle(target)
        task_s = c.nb * (block + cold * self._waiting(c)) / target.frequency_hz
        seconds, rounds = machine.parallel_seconds(tasks, task_s, c.par, self.task.threads)
        if self.found.copied:
            elements = con.groups * con.rows * depth
            seconds = seconds + elements * acc / 16.0 / target.frequency_hz
        weights = float(con.groups * con.n * depth * size)
        floor = weights / target.dram_bytes_per_s
        seconds = np.maximum(seconds, floor * WORTH + seconds * (1 - WORTH))
        return Symbols(
            registers,
            tiles * c.nv,
            con.rows * depth * acc + c.nc * c.nv * self.lanes * size,  # S3
            tasks,
            (weights + con.groups * con.rows * depth * acc) * ones,
            rounds,
            ones * depth * size,
            2.0 * con.groups * self.blocks * self.lanes * con.rows * depth * ones,
            seconds,
        )

    def _waiting(self, c: InPlaceDecisions[Array]) -> Array:
        """Share of the time that the second operand takes from memory and nothing else happens.

        Measured on a Zen 3: one row of float32 is read ahead by the processor itself, best as
        several long streams; the more is done with each vector, the less of what follows is seen
        early.
        """
        con, size = self.con, self.format.itemsize
        work = con.rows - 1 + ITEMSIZE[con.acc_dtype] / size - 1
        alone = min(0.8, 0.1 + 0.1 * work) - 0.01 * np.log2(c.nc) * (work == 0)
        short = _STREAM / (con.k[-1] * size) * (1 + 0.5 * work)
        waiting: Array = np.where(c.ahead > 0, 0.2 - 0.1 * min(work, 1.0), alone)
        return waiting + np.where(c.nc > 1, short, 0.0)

    def _step_cycles(self, c: InPlaceDecisions[Array]) -> Array:
        """Cycles of ``nv`` vectors of the reduction of the columns that are summed together."""
        con, target = self.con, self.task.target
        fmas = con.rows * c.nc * c.nv
        loads = (con.rows + c.nc) * c.nv
        vectors = c.nc * c.nv
        widened = self.format.widening * vectors
        fetched = np.where(c.ahead > 0, c.nc * np.maximum(1, c.nv / 2), 0.0)
        shared = np.where(c.nc > 1, con.rows * c.nv, 0.0)  # else a part of the product
        issued = fmas + vectors + shared + widened + fetched + 2
        cycles = np.maximum(fmas / target.fma_per_cycle, machine.FMA_LATENCY)
        cycles = np.maximum(cycles, (loads + fetched) / machine.LOADS_PER_CYCLE)
        result: Array = np.maximum(cycles, issued / machine.ISSUED_PER_CYCLE)
        return result

    def default(self) -> Decisions:
        return self.best_predicted(6_000)
