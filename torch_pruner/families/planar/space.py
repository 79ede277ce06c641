"""The space of convolutions in planes, with the draft model's estimates. Decisions: see ``form``.

The symbols are those of Pruner's Symbol-based Analyzer.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.contraction.form import LONG_SUM, SUM_PART
from torch_pruner.families.planar.form import (
    FEW_LANES,
    UNROLLED_FMAS,
    PlanarDecisions,
    lying,
    planes_of,
)
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.contraction import contraction_of

if TYPE_CHECKING:
    from torch_pruner.families.planar.form import Planes
    from torch_pruner.task import Task

_MAX_ROWS = 16
_VECTORS = [1, 2, 3, 4, 5, 6, 7, 8]  # lines of 7 and 14 positions are not in even ones
_BYTES = 4
_OF_THE_CACHE = 0.5  # the second one, that a region may take
_OF_THE_FIRST = 0.8
_MAX_UNROLLED = 512  # vector multiply-adds of a kernel line: more take seconds to compile
# Cycles of a vector that is copied; of one that has every other element; of one that is alone.
_COPIED, _DEALT, _GATHERED = 2.5, 3.0, 0.6
_EACH = 0.3  # of the second, whatever its width
_WOVEN = 2.5  # cycles more of a vector of results
_LINE_CYCLES, _TILE_CYCLES, _LEFT_CYCLES = 0.5, 6.0, 2.0
_WRITTEN, _LAST = 1.5, 0.5  # of a vector of results, and of a line


class PlanarSketch(Sketch[PlanarDecisions[Array]]):
    """See the module."""

    name = "planar"
    decisions = PlanarDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.con = contraction_of(task.spec)
        self.planes = planes_of(task.spec, self.con)
        self.lanes = max(1, task.target.vector_bytes // _BYTES)
        # One pipe multiplies a whole vector in a cycle, two multiply halves.
        self._halved = task.target.vector_bytes == 64 and task.target.fma_per_cycle == 1

    @staticmethod
    def fits(task: Task) -> bool:
        planes = planes_of(task.spec, contraction_of(task.spec))
        return bool(planes.region(1) * _BYTES <= _OF_THE_CACHE * task.target.l2_bytes)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        p: Planes = self.planes
        rows = [t for t in range(1, _MAX_ROWS + 1) if t <= p.rows]
        height = p.out[1]
        lines = [n for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 28, 32) if n <= height]
        if height not in lines and height <= 64:
            lines.append(height)
        parts = [n for n in (1, 2, 4, 8, 16, 32) if n <= p.rows]
        most = math.prod(p.tasks(1, 1, max(parts)))
        chunks = [n for n in (1, 2, 4, 6, 8, 12, 16, 24, 32, 64) if n <= most]
        parallel = [0, 1] if self.task.threads > 1 else [0]
        copied = [1] if lying(self.task.spec, self.con, p) is None else [0, 1]
        lanes, below = [self.lanes], [0]
        if p.kernel[1] > 1 and height > 1:
            half, width, below = self.lanes // 2, p.out[2], [0, 1]
            # Where they fill lines better; vectors of four lanes are slow.
            if half > FEW_LANES and -(-width // half) * half < -(-width // self.lanes) * self.lanes:
                lanes = [half, self.lanes]
        options = (lanes, rows, _VECTORS, lines, parts, chunks, parallel, copied, below)
        return tuple(np.array(d, dtype=np.int64) for d in options)

    def _blocks(self, c: PlanarDecisions[Array]) -> tuple[Array, Array, Array]:
        """Tiles of a group's output channels, parts of them, and tiles of a part."""
        blocks = np.ceil(self.planes.rows / c.tm)
        each = np.ceil(blocks / c.rp)
        return blocks, np.ceil(blocks / each), each

    def _tasks(self, c: PlanarDecisions[Array]) -> Array:
        p = self.planes
        _, parts, _ = self._blocks(c)
        tasks: Array = p.images * p.groups * parts * p.out[0] * np.ceil(p.out[1] / c.ln)
        return tasks

    def valid(self, decisions: Decisions) -> Mask:
        c, p, target = self.columns(decisions), self.planes, self.task.target
        side = c.tm * c.nv + c.nv + 1 <= target.vector_registers
        side &= c.tm * c.nv * p.kernel[2] <= _MAX_UNROLLED
        # A kernel column's weights and one vector are at hand besides the sums; all is written out.
        below = c.tm * (c.nv + p.kernel[1]) + 1 <= target.vector_registers
        below &= (c.nv > 1) & (c.nv <= c.ln) & (c.vl <= p.pitch) & (c.cp == 1)
        below &= c.tm * c.nv * p.taps <= UNROLLED_FMAS
        fits = np.where(c.bl == 1, below, side)
        fits &= (c.cp == 1) | (c.ln * p.pitch >= c.nv * c.vl)
        fits &= (
            (c.cp == 0) | (p.region(c.ln) * _BYTES <= _OF_THE_CACHE * target.l2_bytes) | (c.ln == 1)
        )
        blocks, parts, _ = self._blocks(c)
        # No chunk is empty, whatever remains.
        tasks = self._tasks(c)
        shared = np.where(c.par == 1, (c.mc >= 2) & (c.mc <= tasks), (c.mc == 1) & (c.rp == 1))
        result: Mask = fits & shared & (c.rp <= blocks) & (parts == c.rp)
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, p, target = self.columns(decisions), self.planes, self.task.target
        spec, threads = self.task.spec, self.task.threads
        _, _, each = self._blocks(c)
        ones = np.ones(len(decisions))
        width = c.nv * c.vl
        down = np.ceil(c.ln / c.nv) * np.ceil(p.out[2] / c.vl)
        tiles = np.where(c.bl == 1, down, np.ceil(c.ln * p.pitch / width))
        region = p.region(c.ln) * _BYTES

        step = machine.tile_step_cycles(c.tm, c.nv, ones, 4.0 * ones, target)
        if p.taps > 1:  # most vectors of a shifted region lie across two lines of the cache
            step = np.maximum(step, (c.tm + c.nv * self._read(c)) / machine.LOADS_PER_CYCLE)
        parts = math.ceil(p.depth / SUM_PART) if p.depth > LONG_SUM else 1
        tile = p.depth * step + _TILE_CYCLES + c.tm * c.nv * (1 + 3 * (parts - 1) + 1)
        left = p.channels * self._below(c) + _LEFT_CYCLES + c.tm * c.nv * (1 + 3 * (parts - 1))
        tile = np.where(c.bl == 1, left, tile)
        # A tile passes over its positions of every channel; weights come again for each tile.
        passed = p.channels * p.copies * (width + p.pitch) * _BYTES
        panel = p.depth * c.tm * _BYTES
        from_region = 0.3 * passed / machine.bytes_per_cycle(region, target)
        tile = tile + np.where(c.bl == 1, 0.0, from_region)
        tile = tile + 0.3 * panel / machine.bytes_per_cycle(panel + passed, target)

        across = p.spread[2]
        vectors = math.ceil(p.out[2] * across / self.lanes)
        after = set(range(self.con.anchor + 1, len(spec.nodes)))
        # Results that interleave are gathered of several sums; of two, vectors are woven.
        taken = {1: _WRITTEN, 2: _WRITTEN + _WOVEN}.get(across, _WRITTEN + self.lanes)
        line = vectors * (taken + machine.pointwise_cycles(spec, after)) + _LAST
        written = c.tm * c.ln * line / across

        pieces = p.channels * p.copies * p.lines(c.ln)
        copied = c.cp * pieces * (self._moved() + _LINE_CYCLES)
        # Vectors below one another pass once over a region, which comes and goes if it is large.
        near = region + p.results * c.tm * c.ln * p.pitch * _BYTES
        large = (c.bl == 1) & (near > _OF_THE_FIRST * target.l1_bytes)
        again = np.ceil(each) * 2 * near / machine.bytes_per_cycle(near, target)
        copied = copied + np.where(large, again, 0.0)
        # Input, and results, in the share of a task.
        tasks = self._tasks(c)
        data = machine.input_bytes(spec) + machine.output_bytes(spec)
        memory = data / tasks / machine.bytes_per_cycle(np.full(len(decisions), data), target)
        weights = p.results * p.rows * p.depth * _BYTES
        far = weights / c.rp / machine.bytes_per_cycle(np.full(len(decisions), weights), target)
        task = each * p.results * (tiles * tile + written) + copied + 0.5 * memory + 0.3 * far

        chunks = np.ceil(tasks / np.ceil(tasks / c.mc))
        task_s = np.ceil(tasks / c.mc) * task / target.frequency_hz
        seconds, rounds = machine.parallel_seconds(chunks, task_s, c.par, threads)
        return Symbols(
            c.tm * c.nv + c.nv + 1,
            c.tm * c.nv * p.depth,
            region,
            chunks,
            data + region * tasks,
            rounds,
            p.pitch * _BYTES * ones,
            2.0 * p.results * p.depth * each * c.tm * tiles * width * tasks,
            seconds,
        )

    def _read(self, c: PlanarDecisions[Array]) -> Array:
        """Loads that a vector takes as it lies: a whole one across two lines of the cache is two,
        and each of those is two where pipes have half of its width."""
        whole = c.vl == self.lanes
        size = c.vl * _BYTES / machine.CACHE_LINE
        loads: Array = (1 + size) * np.where(whole & self._halved, 2.0, 1.0)
        return loads

    @cached_property
    def _lines_below(self) -> Array:
        """Lines that a kernel column reads, by the lines of a tile."""
        return np.array([0, *(len(self.planes.read_below(n)) for n in _VECTORS)])

    def _below(self, c: PlanarDecisions[Array]) -> Array:
        """Cycles of an input channel in a tile whose vectors lie below one another."""
        p, target = self.planes, self.task.target
        lines, fmas = self._lines_below[c.nv.astype(int)], c.tm * c.nv * p.taps
        vectors = lines * (p.taps / p.kernel[1])
        # Weights of the only channel stay in registers where these suffice.
        held = c.tm * (c.nv + p.taps) + 1 <= target.vector_registers
        weights = np.where(held & (p.channels == 1), 0.0, c.tm * p.taps)
        loads = weights + vectors * self._read(c)
        pipes = target.fma_per_cycle * np.where(self._halved, self.lanes / c.vl, 1.0)
        cycles = np.maximum(fmas / np.minimum(pipes, 2), loads / machine.LOADS_PER_CYCLE)
        cycles = np.maximum(cycles, (fmas + weights + vectors) / machine.ISSUED_PER_CYCLE)
        chain: Array = np.maximum(cycles, p.taps * machine.FMA_LATENCY)
        return chain

    def _moved(self) -> float:
        """Cycles in which a line of the region gets what it has of the input."""
        p = self.planes
        if p.stride[2] == 1:
            return math.ceil(p.pitch / self.lanes) * _COPIED
        dealt = p.dealt(min(p.pitch, p.extent[2] // 2), self.lanes)
        if not dealt:
            return p.pitch * _GATHERED
        return math.ceil(p.pitch / dealt) * (_EACH + (_DEALT - _EACH) * dealt / self.lanes)

    def default(self) -> Decisions:
        return self.best_predicted(20_000)
