"""The space of depthwise and grouped convolutions: tiles of positions, vectors of channels.

Decisions: see ``form``.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.depthwise.form import DepthwiseDecisions
from torch_pruner.families.kinds import in_planes
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from torch_pruner.task import Task


_MAX_UNROLLED = 72  # vector multiply-adds of one tile: more take seconds to compile
# Cycles that each multiply-add adds in a tile of twice as many, as measured on layers of
# MobileNet-V2, two targets of a Zen 4 and a Xeon (docs/benchmarks.md). Spills, probably.
_CROWDED = 0.6
_CACHE_LINE = 64  # bytes
_PUT_CYCLES = 2.0  # of a weight that the kernel puts into a panel
_EXPOSED = 0.5  # of the shorter of arithmetic and waiting for memory: what does not overlap


class DepthwiseSketch(Sketch[DepthwiseDecisions[Array]]):
    """Depthwise convolutions, transposed ones too, read in place, borders included."""

    name = "depthwise"
    decisions = DepthwiseDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.con = contraction_of(task.spec)
        assert self.con.conv is not None
        self.conv = self.con.conv
        self.itemsize = ITEMSIZE[self.con.acc_dtype]
        self.lanes = max(1, task.target.vector_bytes // self.itemsize)
        self.channels = self.con.groups * self.con.n
        self.inner = 1  # input channels that a sum wants, one after another
        if not self.con.channelwise:
            self.lanes, self.inner = math.gcd(self.lanes, self.con.n), self.con.k[-1]

    def _apart(self, axis: int) -> int:
        """How far elements of the input lie apart along a spatial axis, with zeros in between."""
        spread = self.conv.dilate_input
        return spread[axis] if len(spread) >= -axis else 1

    @cached_property
    def _taps(self) -> float:
        """Products of an element of the result: an input's zeros take none."""
        return self.con.depth / math.prod(self.conv.dilate_input)

    @cached_property
    def lines(self) -> int:
        return math.prod(self.con.m[:-1])

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        con = self.con
        columns = [t for t in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14) if t <= con.m[-1]]
        tall = con.channelwise and len(con.m) > 2 and con.m[-2] > 1
        heights = [1, self._apart(-2) if self._apart(-2) > 1 else 2] if tall else [1]
        vectors = [v for v in (1, 2, 3, 4) if v <= con.n // self.lanes] or [1]
        if not con.channelwise:  # of one group
            vectors = [v for v in vectors if con.n // self.lanes % v == 0]
        chunks = [c for c in (1, 2, 4, 6, 8, 14, 28) if c <= self.lines]
        parallel = [0, 1] if self.task.threads > 1 else [0]
        options = ([self.lanes], columns, heights, vectors, chunks, [0, 1, 2], parallel)
        return tuple(np.array(d, dtype=np.int64) for d in options)

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        tile = c.tw * c.th * c.nv
        fits = tile + 2 <= self.task.target.vector_registers
        # Of an input with zeros between its elements, tiles know which of them their outputs read.
        apart, width = self._apart(-1), self.con.m[-1]
        fits &= (c.tw % apart == 0) | (c.tw >= width)
        # Tiles of two lines are unrolled over all offsets, for each border anew: kept short.
        fits &= (c.th == 1) | (tile * self._taps <= _MAX_UNROLLED * self.inner)
        tasks = self._tasks(c)
        result: Mask = fits & np.where(c.par == 1, tasks >= 2, c.mc == 1)
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, con, conv, target = self.columns(decisions), self.con, self.conv, self.task.target
        threads, vectors = self.task.threads, np.maximum(self.channels / self.lanes, 1.0)
        height, width = con.m[-2] if len(con.m) > 2 else 1, con.m[-1]
        strips, tall = np.ceil(width / c.tw), np.ceil(height / c.th)
        images = self.lines / height
        tiles = images * strips * tall * np.ceil(vectors / c.nv)

        stride, dilation = conv.stride[-1], conv.dilation[-1]
        far, offsets = math.prod(conv.kernel[:-2]), conv.kernel[-1]
        kernel_lines = conv.kernel[-2] if len(conv.kernel) > 1 else 1
        down = conv.stride[-2] if len(conv.kernel) > 1 else 1
        rows = np.minimum((c.th - 1) * down + kernel_lines, c.th * kernel_lines) / self._apart(-2)
        span = np.minimum((c.tw - 1) * stride + offsets * 1.0, c.tw * offsets) / self._apart(-1)
        fmas = c.tw * c.th * c.nv * self._taps
        # S1: sums, an element of the input, and the weights of a kernel line; where these do not
        # fit, they are read for each product.
        registers = c.tw * c.th * c.nv + 1 + offsets * c.nv
        kept = registers <= target.vector_registers
        grouped = not con.channelwise
        elements = far * rows * span * (self.inner if grouped else c.nv)
        weights = np.where(kept, np.minimum(con.depth * c.nv, fmas), fmas)
        work = np.maximum(
            fmas / target.fma_per_cycle, (elements + weights) / machine.LOADS_PER_CYCLE
        )
        issued = fmas + elements + np.where(kept, weights, 0.0)
        work = np.maximum(work, issued / machine.ISSUED_PER_CYCLE)
        latency = self._taps * machine.FMA_LATENCY  # chains of one accumulator
        after = set(range(con.anchor + 1, len(self.task.spec.nodes)))
        epilogue = 2.0 + machine.pointwise_cycles(self.task.spec, after)
        cycles = np.maximum(work, latency) + c.tw * c.th * c.nv * epilogue
        beyond = np.maximum(0.0, fmas / (_MAX_UNROLLED * self.inner) - 1)
        cycles = cycles + 8 + 2 * far * rows + _CROWDED * beyond * fmas

        line = con.m[-1] * stride * dilation
        piece = c.nv * self.lanes * self.itemsize
        held = np.select(  # S3: what a core reads again for the next line, in lines of the cache
            [c.order < 2], [line * rows * np.maximum(piece, _CACHE_LINE)],
            line * rows * self.channels * self.itemsize,
        )  # fmt: skip
        again = np.where(c.order == 0, 1.0, 1.0 + 0.1 * (rows / (c.th * down) - 1))
        moved = machine.input_bytes(self.task.spec) + machine.output_bytes(self.task.spec)
        reads = (elements + weights) * tiles * self.lanes * self.itemsize
        memory = again * moved / machine.bytes_per_cycle(np.full(len(decisions), moved), target)
        # Lines that are read in pieces of less than a page defeat the hardware's prefetcher.
        memory = memory * np.where(c.order == 2, 1.0, 1.0 + _CACHE_LINE / 2 / piece)
        total = tiles * cycles + reads / machine.bytes_per_cycle(held, target) * 0.3
        total = np.maximum(total, memory) + _EXPOSED * np.minimum(total, memory)
        total = total + self._scattered
        tasks = self._tasks(c)
        seconds, rounds = machine.parallel_seconds(
            tasks, total / tasks / target.frequency_hz, c.par, threads
        )
        if not self._packed:
            seconds = seconds + self.channels * con.depth * _PUT_CYCLES / target.frequency_hz
        ones = np.ones(len(decisions))
        return Symbols(
            registers, fmas, held, tasks * ones, ones * moved, rounds,
            np.where(c.order == 2, self.channels, c.nv * self.lanes) * self.itemsize * ones,
            ones * con.flops, seconds,
        )  # fmt: skip

    @cached_property
    def _packed(self) -> bool:
        """Whether the weights come in panels."""
        con = self.con
        return con.form != "conv_transpose" and constant_operand(self.task.spec, con) is not None

    @cached_property
    def _scattered(self) -> float:
        """Cycles that vectors of channels take more whose positions lie together.

        Each element is read alone, too, but of groups, which read one for a whole vector anyway.
        """
        if not self._packed or not in_planes(self.task.spec):
            return 0.0
        node = self.task.spec.nodes[self.con.anchor]
        stored = machine.scattered_cycles(self.task.spec, self.con.anchor, self.task.target)
        read = machine.SCATTERED_CYCLES * (1 if self.con.channelwise else -1)
        return (stored + read) * node.numel

    def _tasks(self, c: DepthwiseDecisions[Array]) -> Array:
        blocks = np.maximum(self.channels // (c.nv * self.lanes), 1)
        tasks: Array = c.mc * np.where(c.order == 0, blocks, 1)
        return tasks

    def default(self) -> Decisions:
        return self.best_predicted(20_000)
