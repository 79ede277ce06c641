"""The space of gradients of depthwise weights, with the draft model's estimates.

The symbols are those of Pruner's Symbol-based Analyzer. Decisions: see ``form``.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.depthwise_gradient.form import (
    SUMMED,
    DepthwiseGradientDecisions,
    lines_of,
)
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.depthwise_gradient import gradient_of
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from torch_pruner.task import Task

_STORED_CYCLES = 2.0  # of an element of the result, which lanes scatter
_LINE_CYCLES = 12.0  # to begin a line: its place, what is inside, its loops
_EXPOSED = 0.5  # of the shorter of arithmetic and waiting for memory: what does not overlap


class DepthwiseGradientSketch(Sketch[DepthwiseGradientDecisions[Array]]):
    """Gradients of depthwise convolutions' weights whose operands lie channels last."""

    name = "depthwise_gradient"
    decisions = DepthwiseGradientDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        found = gradient_of(task.spec)
        if found is None:
            raise ValueError("not the gradient of depthwise weights with channels last")
        self.of, self.con, self.lines = found, found.con, lines_of(found)
        self.itemsize = ITEMSIZE[self.con.acc_dtype]
        self.lanes = max(1, task.target.vector_bytes // self.itemsize)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        columns = self.of.taps[-1]
        vectors = [v for v in (1, 2, 3, 4, 6) if v <= max(1, self.of.channels // self.lanes)]
        taps = sorted({-(-columns // n) for n in range(1, columns + 1)})
        most = max(1, SUMMED // self.lines.piece)
        blocks = sorted({min(n, most, self.lines.count) for n in (1, 2, 4, 8, 16, 32, 64, 1024)})
        chunks = [c for c in (1, 2, 3, 4, 6, 8, 16, 32, 64) if c <= self.lines.count]
        parallel = [0, 1] if self.task.threads > 1 else [0]
        options = ([self.lanes], vectors, taps, blocks, chunks, parallel)
        return tuple(np.array(d, dtype=np.int64) for d in options)

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        # Sums, an element of both operands for each vector, and one to spare.
        fits = (c.tc * c.nv + c.nv + 1 <= self.task.target.vector_registers) | (
            (c.tc == 1) & (c.nv == 1)
        )
        blocks = np.ceil(self.lines.count / c.lb)
        tasks = self._tasks(c)
        result: Mask = fits & (c.mc <= blocks) & np.where(c.par == 1, tasks >= 2, c.mc == 1)
        return result

    def _tasks(self, c: DepthwiseGradientDecisions[Array]) -> Array:
        tasks: Array = c.mc * np.ceil(self.of.channels / (c.nv * self.lanes))
        return tasks

    def symbols(self, decisions: Decisions) -> Symbols:
        c, of, target = self.columns(decisions), self.of, self.task.target
        threads, size = self.task.threads, self.itemsize
        rows, columns = math.prod(of.taps[:-1]), of.taps[-1]
        vectors = np.ceil(of.channels / self.lanes)
        lines, width = self.lines.count, self.lines.piece

        tiles = np.ceil(columns / c.tc)
        registers = c.tc * c.nv + c.nv + 1  # S1
        fmas = c.tc * c.nv
        step = np.maximum(fmas / target.fma_per_cycle, machine.FMA_LATENCY)
        step = np.maximum(step, (fmas + c.nv) / machine.LOADS_PER_CYCLE)
        step = np.maximum(step, (2 * fmas + c.nv + 2) / machine.ISSUED_PER_CYCLE)
        line = width * step + _LINE_CYCLES
        block = c.lb * line + 2 * fmas  # of a tile
        # S3: lines of both operands that all lines of the kernel pass by.
        down = of.con.conv.dilation[-2] if rows > 1 and of.con.conv is not None else 1
        across = of.con.conv.dilation[-1] if of.con.conv is not None else 1
        piece = c.nv * self.lanes * size
        x_lines = c.lb * down + (rows - 1 if len(of.taps) > 1 else 0)
        held = (c.lb * width + x_lines * width * across) * piece
        reads = 2.0 * c.lb * width * rows * tiles * c.nv * self.lanes * size
        near = reads / machine.bytes_per_cycle(held, target) * 0.3
        blocks = np.ceil(lines / c.lb)
        panels = np.ceil(vectors / c.nv)
        total = panels * blocks * (rows * tiles * block + near)
        moved = machine.input_bytes(self.task.spec)
        memory = moved / machine.bytes_per_cycle(np.full(len(decisions), moved), target)
        memory = memory * (1.0 + machine.CACHE_LINE / 2 / piece)
        total = np.maximum(total, memory) + _EXPOSED * np.minimum(total, memory)
        tasks = self._tasks(c)
        seconds, rounds = machine.parallel_seconds(
            tasks, total / tasks / target.frequency_hz, c.par, threads
        )
        ends = math.prod(of.taps) * (vectors * c.mc + of.channels * _STORED_CYCLES)
        ends = np.where(c.par == 1, ends / np.minimum(threads, vectors), ends)
        seconds = seconds + ends / target.frequency_hz + machine.BARRIER_S
        ones = np.ones(len(decisions))
        return Symbols(
            registers, fmas * ones, held, tasks * ones, ones * moved, rounds, piece * ones,
            ones * self.con.flops, seconds,
        )  # fmt: skip

    def default(self) -> Decisions:
        return self.best_predicted(20_000)
