"""The space of gradients of convolutions' weights, with the draft model's estimates.

The symbols are those of Pruner's Symbol-based Analyzer. Decisions: see ``form``.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.flow import LINE_BYTES
from torch_pruner.families.gradient.form import SUMMED, GradientDecisions, gradient_of
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from torch_pruner.task import Task

_SHORTEST = 24  # positions of a block, where there are so many
_STORED_CYCLES = 2.0  # of an element of the result, which columns scatter
_HIDDEN = 0.6  # of the work, behind which loads from the second cache disappear


class GradientSketch(Sketch[GradientDecisions[Array]]):
    """Float32 gradients of dense convolutions' weights whose operands lie channels last."""

    name = "gradient"
    decisions = GradientDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        found = gradient_of(task.spec)
        if found is None:
            raise ValueError("not the gradient of a convolution's weights with channels last")
        self.gradient, self.con = found, found.con
        self.itemsize = ITEMSIZE[self.con.acc_dtype]
        self.lanes = _lanes(task)

    @staticmethod
    def fits(task: Task) -> bool:
        found = gradient_of(task.spec)
        return found is not None and found.con.n % _lanes(task) == 0

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        of, vectors = self.gradient, self.con.n // self.lanes
        rows = [t for t in range(1, 17) if t <= of.channels]
        columns = [v for v in (1, 2, 3, 4, 6) if v <= vectors]
        chunks = [c for c in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if c <= of.tiles(1)]
        parallel = [0, 1] if self.task.threads > 1 else [0]
        options = ([self.lanes], rows, columns, chunks, self._blocks(), parallel)
        return tuple(np.array(d, dtype=np.int64) for d in options)

    def _blocks(self) -> list[int]:
        """Lines of a block: all blocks are alike, and neither too short nor too long."""
        lines, width = self.gradient.lines, self.gradient.piece
        equal = [n for n in range(1, lines + 1) if lines % n == 0]
        short = [n for n in equal if n * width <= SUMMED]
        return [n for n in short if n * width >= _SHORTEST] or short[-1:]

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        tiles = self.gradient.tiles(c.tm)
        fits = c.tm * c.nv + c.nv + 1 <= self.task.target.vector_registers
        tasks = np.ceil(self.con.n / (c.nv * self.lanes)) * c.mc
        shared = np.where(c.par == 1, tasks >= 2, c.mc == 1)
        result: Mask = fits & (c.mc <= tiles) & shared
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, of, con, target = self.columns(decisions), self.gradient, self.con, self.task.target
        size, width, bn = self.itemsize, of.piece, c.nv * self.lanes
        tiles, panels, blocks = of.tiles(c.tm), np.ceil(con.n / bn), of.lines / c.lb
        per_chunk, tasks = np.ceil(tiles / c.mc), panels * c.mc

        registers = c.tm * c.nv + c.nv + 1  # S1
        positions = c.lb * width
        rows_bytes = positions * LINE_BYTES * np.ceil(c.tm * size / LINE_BYTES)
        panel_bytes = positions * bn * size
        held = rows_bytes + panel_bytes  # S3
        images = of.lines * width * of.channels * size  # of the first operand, whole
        around = images * np.minimum(1.0, (c.lb + con.m[1] - 1) / of.lines)
        sums_bytes = per_chunk * c.tm * bn * size

        ones = np.ones(len(decisions))
        last = np.ceil(con.n / self.lanes) - (panels - 1) * c.nv
        full, cut = (machine.tile_step_cycles(c.tm, v, ones, ones, target) for v in (c.nv, last))
        step = ((panels - 1) * full + cut) / panels
        busy = positions * step * self._share_inside + 4 * c.lb
        near = held <= 0.8 * target.l1_bytes
        moved = rows_bytes / machine.bytes_per_cycle(around, target)
        moved = moved + np.where(near, 0.0, panel_bytes / machine.bytes_per_cycle(held, target))
        kept = 2 * c.tm * bn * size / machine.bytes_per_cycle(sums_bytes, target) + 20
        kept = np.where(blocks > 1, kept, 0.0)
        tile = blocks * (busy + np.maximum(0.0, moved - _HIDDEN * busy) + kept)
        after = set(range(con.anchor + 1, len(self.task.spec.nodes)))
        stored = _STORED_CYCLES * self.lanes + machine.pointwise_cycles(self.task.spec, after)
        tile = tile + c.tm * c.nv * stored + 20

        second = of.lines * width * con.n * size
        stream = (images / c.mc + second / panels) / machine.bytes_per_cycle(
            ones * (images + second), target
        )
        task_s = (per_chunk * tile + 0.3 * stream) / target.frequency_hz
        seconds, rounds = machine.parallel_seconds(tasks, task_s, c.par, self.task.threads)
        traffic = panels * images + c.mc * second
        return Symbols(
            registers, c.tm * c.nv * con.depth, held, tasks * ones, traffic, rounds,
            bn * size, 2.0 * con.n * tiles * c.tm * con.depth, seconds,
        )  # fmt: skip

    @cached_property
    def _share_inside(self) -> float:
        """Share of (tap, position) pairs that read the input and not its border."""
        con, conv, share = self.con, self.con.conv, 1.0
        assert conv is not None
        extent = self.task.spec.nodes[con.a].shape[2:]
        for d, size in enumerate(extent):
            taps = np.arange(con.m[1 + d])[:, None] * conv.stride[d] - conv.lo[d]
            at = taps + np.arange(con.k[d]) * conv.dilation[d]
            share *= float(np.mean((at >= 0) & (at < size)))
        return share

    def default(self) -> Decisions:
        return self.best_predicted(6_000)


def _lanes(task: Task) -> int:
    return max(1, task.target.vector_bytes // ITEMSIZE["float32"])
