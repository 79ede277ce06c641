"""The space of products of rows in groups: groups are estimated to have rows alike."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.grouped_product.form import (
    PAIRED,
    GroupedProductDecisions,
    grouped_of,
    pairs_of,
)
from torch_pruner.families.space import Array, Mask, Sketch, Symbols
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions
    from torch_pruner.task import Task

_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
_COLUMNS = (1, 2, 3, 4, 5, 6, 8)
_BLOCKS = (1, 2, 4, 8, 16)
_UNROLLED = (1, 2, 4)
_WIDENED = 1.5  # cycles of a vector of halves that becomes floats
_ACROSS = 6.0  # of a sum across the lanes of a vector
_TILE = 10.0  # of a tile beside its sums


class GroupedProductSketch(Sketch[GroupedProductDecisions[Array]]):
    """See the module."""

    name = "grouped_product"
    decisions = GroupedProductDecisions
    packs = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.found = grouped_of(task.spec)
        self.lanes = self.found.lanes(max(1, task.target.vector_bytes // 4))
        paired = pairs_of(task.spec, self.found) is not None
        self.paired = paired and 2 * self.lanes == PAIRED

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        found, units = self.found, self.found.units(self.lanes)
        steps = found.depth // self.lanes if found.along_k else found.depth
        options = (
            [self.lanes],
            [n for n in _ROWS if n <= found.rows],
            [n for n in _COLUMNS if n <= units],
            [n for n in _BLOCKS if n <= units],
            [n for n in _UNROLLED if n <= steps],
            [0, 1] if self.task.threads > 1 else [0],
            [0, 1] if self.task.target.bf16_dot and self.paired else [0],
        )
        return tuple(np.array(o, dtype=np.int64) for o in options)

    def valid(self, decisions: Decisions) -> Mask:
        c, units = self.columns(decisions), self.found.units(self.lanes)
        fits: Mask = c.tm * c.nc + c.nc + 1 <= self.task.target.vector_registers
        return fits & ((c.nc - 1) * c.nb < units)

    def symbols(self, decisions: Decisions) -> Symbols:
        c, found, target = self.columns(decisions), self.found, self.task.target
        ones = np.ones(len(decisions))
        size = ITEMSIZE[found.node.dtype]
        active = min(found.groups, found.rows)  # groups that have any rows
        rows = -(-found.rows // active)
        blocks = np.ceil(found.units(self.lanes) / c.nc)
        tasks = np.ceil(blocks / c.nb)
        whole, rest = np.floor(rows / c.tm), rows % c.tm
        width = c.nc if found.along_k else c.nc * c.vl
        panel = width * found.depth * size
        summed = whole * self._tile_cycles(c, c.tm) + rest * self._tile_cycles(c, ones)
        # A block of the matrix comes from far away once, and then passes by the other tiles.
        again = np.maximum(whole + rest - 1, 0.0) * panel
        near = again / machine.bytes_per_cycle(panel, target)
        matrices = float(found.groups * found.depth * found.columns * size)
        far = panel / machine.bytes_per_cycle(ones * matrices, target)
        given = float(rows * found.depth * size)
        moved = given / machine.bytes_per_cycle(ones * given, target)
        cycles = np.maximum(summed, far) + 0.3 * np.minimum(summed, far) + 0.3 * (near + moved)
        task_s = c.nb * cycles / target.frequency_hz
        count = tasks * active
        seconds, rounds = machine.parallel_seconds(count, task_s, c.par, self.task.threads)
        seconds = seconds + tasks * (found.groups - active) * machine.TASK_S
        return Symbols(
            c.tm * c.nc + c.nc + 1, c.tm * c.nc * found.depth, panel, count,
            active * found.depth * found.columns * size + blocks * active * given, rounds,
            (found.depth if found.along_k else found.columns) * size * ones,
            2.0 * found.rows * found.depth * found.columns * ones, seconds,
        )  # fmt: skip

    def _tile_cycles(self, c: GroupedProductDecisions[Array], rows: Array) -> Array:
        found = self.found
        steps = found.depth / self.lanes if found.along_k else float(found.depth)
        fetched, target = 2.0 * np.ones(len(rows)), self.task.target
        step = machine.tile_step_cycles(rows, c.nc, fetched, c.ku, target)
        if ITEMSIZE[found.node.dtype] < ITEMSIZE["float32"]:
            step = step + _WIDENED * (c.nc + (rows if found.along_k else 0.0))
        dots = rows * c.nc * target.bf16_dot_fmas / target.fma_per_cycle
        dots = np.maximum(dots, machine.FMA_LATENCY)
        dots = np.maximum(dots, (rows + c.nc) / machine.LOADS_PER_CYCLE) + 1.0 / c.ku
        # A step of dots is of twice as many numbers as lanes.
        step = np.where(c.dots == 1, dots * self.lanes / PAIRED, step)
        after = rows * c.nc * (_ACROSS if found.along_k else 1.0)
        cycles: Array = steps * step + after + _TILE
        return cycles

    def default(self) -> Decisions:
        return self.best_predicted()
