"""The space of attention of few queries, with estimates. Decisions: see ``form``."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.decode_attention.form import DecodeDecisions, few_queries_of
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.contraction import accumulator
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from torch_pruner.task import Task

_EXP_CYCLES = 14.0  # of one vector of scores
_ROW_CYCLES = 60.0  # of a row and a block: the maximum across lanes, the scale
_BLOCK_CYCLES = 200.0  # of a block: the same of one row, each step after the one before
_UNIT_CYCLES = 200.0  # to begin a unit
# What waiting adds to reading and work, in parts of the shorter, by ``ahead``: without fetches the
# processor reads on only while little else happens. Measured on a Zen 5 with eight heads to a key.
_WAITING = np.array([2.5, 1.9, 0.0])


def _lanes(task: Task) -> int:
    few = few_queries_of(task.spec)
    assert few is not None
    size = ITEMSIZE[accumulator(task.spec.nodes[few.att.out].dtype)]
    return max(2, task.target.vector_bytes // size)


class DecodeAttentionSketch(Sketch[DecodeDecisions[Array]]):
    """See the module."""

    name = "decode_attention"
    decisions = DecodeDecisions
    packs = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        few = few_queries_of(task.spec)
        if few is None:
            raise ValueError("the kernel graph is not attention of few queries")
        self.few, self.att, self.lanes = few, few.att, _lanes(task)
        self.slots = -(-self.att.width // self.lanes)
        self.chunks = -(-self.att.depth // self.lanes)

    @staticmethod
    def fits(task: Task) -> bool:
        few = few_queries_of(task.spec)
        return few is not None and min(few.att.depth, few.att.width, few.att.keys) >= _lanes(task)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        rows, keys, threads = self.few.rows, self.att.keys, self.task.threads
        halves = [n for n in (1, 2, 4, 8, 16) if n <= self.lanes and n < 2 * rows]
        blocks = [b for b in (32, 64, 128, 256, 512) if b % self.lanes == 0 and b <= keys]
        tile = [n for n in range(1, 9) if n <= rows and (rows % n == 0 or n in (4, 8))]
        columns = [c for c in (1, 2, 3, 4, 8) if c <= self.slots]
        shares = sorted({s for s in (1, 2, 4, 8, threads) if s <= min(threads, 16)})
        tasks = [1, threads] if threads > 1 else [1]
        options = (
            [self.lanes], halves, blocks or [self.lanes], tile, columns, shares, [0, 1, 2], tasks
        )  # fmt: skip
        return tuple(np.array(o, dtype=np.int64) for o in options)

    def valid(self, decisions: Decisions) -> Mask:
        c, registers = self.columns(decisions), self.task.target.vector_registers
        sums = (c.nr * c.nc + c.nc + 1 <= registers) | ((c.nr == 1) & (c.nc == 1))
        divided = (c.shares == 1) | (c.shares * c.kb <= self.att.keys)
        parallel = np.where(c.tasks > 1, self.few.groups * c.shares > 1, c.shares == 1)
        result: Mask = sums & divided & parallel
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, att, few, target = self.columns(decisions), self.att, self.few, self.task.target
        ones, rows, lanes = np.ones(len(decisions)), self.few.rows, self.lanes
        size = {n: ITEMSIZE[self.task.spec.nodes[n].dtype] for n in self._operands}
        bytes_of_key = sum(size.values()) / 2 * (att.depth + att.width)
        units = few.groups * c.shares
        per_task = np.ceil(units / np.minimum(c.tasks, units))
        keys = np.ceil(np.ceil(att.keys / c.kb) / c.shares) * c.kb

        score, sums = self._score_cycles(c), self._sums_cycles(c)
        softmax = rows * (np.ceil(c.kb / lanes) * (_EXP_CYCLES + 4) + _ROW_CYCLES) / c.kb
        softmax = softmax + _BLOCK_CYCLES / c.kb
        work = keys * (score + sums + softmax)
        cold = keys * bytes_of_key / machine.memory_bytes_per_cycle(target)
        block = c.kb * (bytes_of_key + 4.0 * rows)
        work = work * np.where(block > 0.8 * target.l1_bytes, 1.25, 1.0)
        cycles = work + cold + _WAITING[c.ahead.astype(int)] * np.minimum(work, cold)
        cycles = cycles + rows * (self.chunks + 2.0 * self.slots) * 2 + _UNIT_CYCLES
        task_s = per_task * cycles / target.frequency_hz
        parallel = c.tasks > 1
        seconds = task_s + np.where(parallel, machine.LAUNCH_S + machine.TASK_S, 0.0)
        together = np.where(c.shares > 1, few.groups * rows * c.shares * self.slots * 4.0, 0.0)
        seconds = seconds + together / c.tasks / target.frequency_hz
        traffic = float(few.groups * att.keys * bytes_of_key)
        seconds = np.maximum(seconds, traffic / target.dram_bytes_per_s)
        return Symbols(
            np.maximum(lanes + 2, c.nr * c.nc + c.nc + 1) * ones,
            c.nr * c.nc * c.kb,
            c.kb * (bytes_of_key + 4.0 * rows),
            np.minimum(c.tasks, units),
            traffic * ones,
            per_task,
            float(att.depth) * max(size.values()) * ones,
            2.0 * att.groups * att.queries * att.keys * (att.depth + att.width) * ones,
            seconds,
        )

    @property
    def _operands(self) -> tuple[int, int]:
        nodes = self.task.spec.nodes
        return nodes[self.att.scores].inputs[1], nodes[self.att.out].inputs[1]

    def _widened(self, node: int) -> float:
        """Instructions that make a vector of an operand one of the sums' dtype."""
        dtype = self.task.spec.nodes[node].dtype
        return {"bfloat16": 2.0, "float16": 1.0, "int8": 2.0}.get(dtype, 0.0)

    def _score_cycles(self, c: DecodeDecisions[Array]) -> Array:
        """Cycles of one key for all rows: tiles of ``nq`` rows by so many keys as fill a vector."""
        together, tiles = self.lanes / c.nq, np.ceil(self.few.rows / c.nq)
        loads = (together * (1 + self._widened(self._operands[0])) + c.nq) * self.chunks
        fmas = self.lanes * self.chunks
        across = 3.0 * self.lanes
        issued = (fmas + loads + across) / machine.ISSUED_PER_CYCLE
        cycles = np.maximum(fmas / self.task.target.fma_per_cycle + across / 2, issued)
        result: Array = tiles * np.maximum(cycles, loads / machine.LOADS_PER_CYCLE) / together
        return result

    def _sums_cycles(self, c: DecodeDecisions[Array]) -> Array:
        """Cycles of one value for all rows."""
        tiles = np.ceil(self.few.rows / c.nr) * np.ceil(self.slots / c.nc)
        fmas = c.nr * c.nc
        loads = c.nr + c.nc * (1 + self._widened(self._operands[1]))
        cycles = np.maximum(fmas / self.task.target.fma_per_cycle, machine.FMA_LATENCY)
        cycles = np.maximum(cycles, loads / machine.LOADS_PER_CYCLE)
        issued = (fmas + loads + 2) / machine.ISSUED_PER_CYCLE
        ends = 2.0 * fmas / c.kb
        result: Array = tiles * (np.maximum(cycles, issued) + ends)
        return result

    def default(self) -> Decisions:
        return self.best_predicted(6_000)
