"""The space of products of few rows that read their second operand where it lies, with estimates.

It lies along the reduction. The symbols are those of Pruner's Symbol-based Analyzer. Decisions: see
``form``.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.in_place.form import (
    Format,
    InPlaceDecisions,
    format_of,
    in_place_of,
)
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.strided import strided

if TYPE_CHECKING:
    from torch_pruner.task import Task

_ACROSS_CYCLES = 0.5  # of a step that adds half of a vector to the other, beside other columns'
_COLUMN_CYCLES = 4.0  # to begin and end the sums of some columns
_STREAM = 192.0  # bytes of a column that are read before its stream is known
_LINE = 64.0  # bytes
_AHEAD = (2048, 4096, 8192, 16384)  # bytes
_WAITING = (0.12, 0.06, 0.02, 0.03)  # what fetching so far ahead does not hide
# The same where the processor reads ahead by itself: the further, the more is in its way.
_IN_ITS_WAY = (0.02, 0.06, 0.07, 0.08)
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
        self.lanes = max(2, task.target.vector_bytes // ITEMSIZE[self.con.acc_dtype])
        self.format = self._format()
        self.blocks = -(-self.con.n // self.lanes)

    @staticmethod
    def fits(task: Task) -> bool:
        return in_place_of(task.spec) is not None

    def _format(self) -> Format:
        return format_of(self.task.spec, self.con)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        vectors = max(1, self.con.k[-1] // self.lanes)
        several = [v for v in (1, 2, 4, 8) if v <= vectors]
        together = [c for c in (1, 2, 4, 8) if c <= min(self.lanes, self.con.n)]
        blocks = [b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) if b <= self.blocks]
        ahead = [0] if strided(self.task.spec, self.con.b) is None else [0, *_AHEAD]
        parallel = [0, 1] if self.task.threads > 1 else [0]
        options = ([self.lanes], several, together, blocks, ahead, parallel)
        return tuple(np.array(d, dtype=np.int64) for d in options)

    def _each(self, c: InPlaceDecisions[Array]) -> Array:
        """Blocks of a task: as even as so many tasks can be."""
        each: Array = np.ceil(self.blocks / np.ceil(self.blocks / c.nb))
        return each

    def _tasks(self, c: InPlaceDecisions[Array]) -> Array:
        tasks: Array = self.con.groups * np.ceil(self.blocks / self._each(c))
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
        across = tiles * np.log2(self.lanes) * _ACROSS_CYCLES + tiles * c.nv / 2
        columns = steps * step + across + _COLUMN_CYCLES
        after = set(range(con.anchor + 1, len(spec.nodes)))
        written = con.rows * (4 + machine.pointwise_cycles(spec, after))
        block = np.minimum(self.lanes, con.n) / c.nc * columns + written

        tasks = self._tasks(c)
        cold = self.lanes * depth * size / machine.memory_bytes_per_cycle(target)
        block = machine.from_memory(block, cold) + cold * self._waiting(c)
        task_s = self._each(c) * block / target.frequency_hz
        seconds, rounds = machine.parallel_seconds(tasks, task_s, c.par, self.task.threads)
        if self.found.copied:
            elements = con.groups * con.rows * depth
            seconds = seconds + elements * acc / 16.0 / target.frequency_hz
        weights = float(con.groups * con.n * depth * size)
        return Symbols(
            registers,
            tiles * c.nv,
            con.rows * depth * acc + c.nc * c.nv * self.lanes * size,  # S3
            tasks,
            (weights + con.groups * con.rows * depth * acc) * ones,
            rounds,
            ones * depth * size,
            2.0 * con.groups * self.blocks * self.lanes * con.rows * depth * ones,
            WORTH * seconds,
        )

    def _waiting(self, c: InPlaceDecisions[Array]) -> Array:
        """Time for which nothing happens, as a share of what a streaming read takes.

        Measured on a Zen 5: one column after another is a stream that the processor reads ahead
        by itself where little is done with each line of it; else it wants to be asked for what
        lies some lines further. Several columns are as many short streams.
        """
        con, size = self.con, self.format.itemsize
        more, narrow = con.rows - 1, ITEMSIZE[con.acc_dtype] / size - 1
        if self.task.target.reads_ahead:
            single = self._beside_its_own(c, narrow)
        else:
            fetched = np.interp(c.ahead, _AHEAD, _WAITING)
            single = np.where(c.ahead > 0, fetched, 0.05 + 0.05 * narrow)
        single = single + min(0.6, 0.1 * max(0, more - 1))
        several = np.where(c.ahead > 0, 0.0, 0.3 * narrow + 0.1 * more)
        several = several + 0.03 + 0.04 * more + _STREAM / (con.k[-1] * size)
        waiting: Array = np.where(c.nc > 1, several, single)
        return waiting

    def _beside_its_own(self, c: InPlaceDecisions[Array], narrow: float) -> Array:
        """The same of one column after another, beside prefetchers that keep up with whole floats.

        Measured on a Zen 3: a fetch of floats takes 6 to 14 points of the read. What is widened
        wants one, bytes so much that packed panels read them faster. Likely, but not shown: its
        window of instructions spans the lines of floats that memory has under way, and of what is
        widened fewer.
        """
        fetched = np.interp(c.ahead, _AHEAD, _IN_ITS_WAY)
        fetched = fetched + (0.075 * max(0.0, narrow - 1) if narrow else 0.1)
        waiting: Array = np.where(c.ahead > 0, fetched, 0.35 * min(1.0, narrow) if narrow else 0.02)
        return waiting

    def _step_cycles(self, c: InPlaceDecisions[Array]) -> Array:
        """Cycles of ``nv`` vectors of the reduction of the columns that are summed together."""
        con, target = self.con, self.task.target
        fmas = con.rows * c.nc * c.nv
        # Rows that lie far apart meet in sets of the first cache.
        loads = (con.rows * np.interp(con.rows, (2, 4), (1, 4)) + c.nc) * c.nv
        vectors = c.nc * c.nv
        widened = self.format.widening * vectors
        lines = vectors * self.lanes * self.format.itemsize / _LINE
        fetched = np.where(c.ahead > 0, np.maximum(1.0, lines), 0.0)
        shared = np.where(c.nc > 1, con.rows * c.nv, 0.0)  # else a part of the product
        issued = fmas + vectors + shared + widened + fetched + 2
        cycles = np.maximum(fmas / target.fma_per_cycle, machine.FMA_LATENCY)
        cycles = np.maximum(cycles, (loads + fetched) / machine.LOADS_PER_CYCLE)
        # Rows that the first cache does not hold come from the second, for every column anew. The
        # weight passes through both, which leaves half of what they give.
        held = np.array(1.5 * con.rows * con.k[-1] * ITEMSIZE[con.acc_dtype])
        first = 2 * con.rows * c.nv * target.vector_bytes / machine.bytes_per_cycle(held, target)
        cycles = np.maximum(cycles, np.where(held > 0.8 * target.l1_bytes, first, 0.0))
        result: Array = np.maximum(cycles, issued / machine.ISSUED_PER_CYCLE)
        return result

    def default(self) -> Decisions:
        return self.best_predicted(6_000)
