"""The space of bfloat16 products in AMX tiles."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families.bf16_pairs.form import COLUMNS, PLANES, takes_pairs, ways
from torch_pruner.families.bf16_pairs.space import PairSketch
from torch_pruner.families.bf16_tiles.form import Bf16TilesDecisions
from torch_pruner.families.space import Array
from torch_pruner.target import tiles_allowed

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions, Mask
    from torch_pruner.task import Task


TILE_CYCLES = 16.0  # of one product of two tiles, from one to the next


TILE_LATENCY = 52.0  # from sums to those that the next step adds to


TILE_LOAD_CYCLES = 8.0  # 16 lines of the level-1 cache


TILE_SETUP_CYCLES = 100.0  # of loading and releasing a task's tile configuration


TILE_REGISTERS = 8


class Bf16TilesSketch(PairSketch[Bf16TilesDecisions[Array]]):
    """Tiles of 16 by 16 sums in AMX registers."""

    name = "bf16_tiles"
    decisions = Bf16TilesDecisions

    @staticmethod
    def fits(task: Task) -> bool:
        if not task.target.bf16_tiles or not takes_pairs(task.spec) or not tiles_allowed():
            return False
        return bool(ways(task.spec, "bf16_tiles"))

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        most = max(form.tiles(form.rows) for form in self.forms.values())
        rows = [t for t in (1, 2, 3) if t <= most]
        columns = [v for v in (1, 2, 4, 6) if v == 1 or (v - 1) * COLUMNS < self.con.n]
        every = (rows, columns, *self._shared_domains())
        return tuple(np.array(d, dtype=np.int64) for d in every)

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        enough = c.rt <= self._by_way(c, lambda form: form.tiles(form.rows))
        result: Mask = (self._registers(c) <= TILE_REGISTERS) & enough & self._fits_work(c)
        return result

    def _height(self, c: Bf16TilesDecisions[Array]) -> Array:
        return self._by_way(c, lambda form: form.rows)

    def _rows(self, c: Bf16TilesDecisions[Array]) -> Array:
        rows: Array = c.rt * self._height(c)
        return rows

    def _row_blocks(self, c: Bf16TilesDecisions[Array]) -> Array:
        return np.ceil(self._by_way(c, lambda form: form.tiles(form.rows)) / c.rt)

    def _registers(self, c: Bf16TilesDecisions[Array]) -> Array:
        registers: Array = c.rt * c.nv + c.rt + 1
        return registers

    def _block_cycles(self, c: Bf16TilesDecisions[Array]) -> tuple[Array, Array]:
        steps, tiles = self._by_way(c, lambda form: form.depth) / 32, c.rt * c.nv
        height = self._height(c) / 16.0
        split = np.where(c.way == PLANES, 2.0, 1.0)  # rows begin anywhere in a line
        loads = (c.rt * height * split + c.nv) * TILE_LOAD_CYCLES
        step = np.maximum(tiles * TILE_CYCLES * height, loads)
        step = np.maximum(step, TILE_LATENCY) + 2 * c.ahead / c.ku + 1
        return tiles * steps, steps * step

    def _task_cycles(self) -> float:
        return TILE_SETUP_CYCLES
