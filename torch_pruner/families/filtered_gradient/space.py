"""The space of gradients of weights by minimal filtering, with the draft model's estimates.

The symbols are those of Pruner's Symbol-based Analyzer. Decisions: see ``form``.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.filtered_gradient.form import (
    FilteredGradientDecisions,
    filtered_gradient_of,
)
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.families.winograd.form import additions
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from torch_pruner.task import Task

_MOST = 256  # tiles that are summed in one go without losing digits
_STORED_CYCLES = 2.0  # of an element of the result, which columns scatter
_HIDDEN = 0.6  # of the work, behind which loads from the second cache disappear
_BORDER = 1.2  # tiles at the border ask for every input whether it exists


class FilteredGradientSketch(Sketch[FilteredGradientDecisions[Array]]):
    """See the module; the algorithm is in ``form``."""

    name = "filtered_gradient"
    decisions = FilteredGradientDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        plan = filtered_gradient_of(task.spec)
        if plan is None:
            raise ValueError("no gradient of three neighbouring taps with channels last")
        self.plan, self.size = plan, ITEMSIZE[plan.con.acc_dtype]
        self.lanes = _lanes(task)

    @staticmethod
    def fits(task: Task) -> bool:
        """Whether the algorithm applies and its vectors are whole."""
        plan, lanes = filtered_gradient_of(task.spec), _lanes(task)
        return plan is not None and lanes > 1 and not (plan.channels % lanes or plan.con.n % lanes)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        plan, lanes, parallel = self.plan, self.lanes, self.task.threads > 1
        rows, columns, tiles = plan.channels // lanes, plan.con.n // lanes, plan.tiles
        shares = (1, 2, 3, 4, 6, 8, 16) if parallel else (1,)
        options = (
            [lanes],
            [t for t in (1, 2, 4, 8) if lanes % t == 0],
            [v for v in (1, 2, 3, 4, 6) if columns % v == 0],
            [t for t in range(1, min(tiles, _MOST) + 1) if tiles % t == 0],
            [s for s in shares if rows % s == 0],
            [s for s in shares if columns % s == 0],
            [u for u in (1, 2, 4) if tiles % u == 0],
            [0, 1] if parallel else [0],
        )
        return tuple(np.array(d, dtype=np.int64) for d in options)

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        fits = c.tm * c.nv + c.nv + 1 <= self.task.target.vector_registers
        fits &= (self.plan.con.n // self.lanes) % (c.nv * c.ns) == 0
        fits &= c.tb % c.ku == 0
        result: Mask = fits & np.where(c.par == 1, c.cs * c.ns >= 2, c.cs * c.ns == 1)
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, plan, target, size = self.columns(decisions), self.plan, self.task.target, self.size
        rows, columns, bn = plan.channels / c.cs, plan.con.n / c.ns, c.nv * self.lanes
        blocks, positions, ones = plan.tiles / c.tb, plan.positions, np.ones(len(decisions))

        registers = c.tm * c.nv + c.nv + 1  # S1
        near = c.tb * (self.lanes + bn) * size  # S3
        step = machine.tile_step_cycles(c.tm, c.nv, ones, c.ku, target)
        busy = c.tb * step
        slices = c.tb * (rows + columns) * size  # of one position
        # Rows come again for every panel, a group's for all of its tiles at once.
        read = c.tb * c.tm * size / machine.bytes_per_cycle(slices, target)
        read = read + np.where(near > 0.8 * target.l1_bytes, c.tb * bn * size / 20.0, 0.0)
        sums = positions * rows * columns * size
        held = positions * slices + sums
        kept = 2 * c.tm * bn * size / machine.bytes_per_cycle(held, target)
        tile = busy + np.maximum(0.0, read - _HIDDEN * busy) + kept + c.tm * c.nv + 20
        multiply = positions * (rows / c.tm) * (columns / bn) * tile
        passed = 2 * positions * slices / machine.bytes_per_cycle(held, target)  # there and back
        block = c.tb * self._transform_cycles(rows, columns) + multiply + passed

        taps = math.prod(plan.con.m[1:])
        after = set(range(plan.con.anchor + 1, len(self.task.spec.nodes)))
        stored = _STORED_CYCLES * self.lanes + machine.pointwise_cycles(self.task.spec, after)
        result = rows * columns / self.lanes * (taps * stored + 2 * positions)
        result = result + sums / machine.bytes_per_cycle(held, target)
        task_s = (blocks * block + result) / target.frequency_hz
        seconds, rounds = machine.parallel_seconds(c.cs * c.ns, task_s, c.par, self.task.threads)
        moved = machine.input_bytes(self.task.spec)
        return Symbols(
            registers, c.tm * c.nv * c.tb, near, c.cs * c.ns, c.cs * c.ns * moved, rounds,
            bn * size, plan.flops * ones, seconds,
        )  # fmt: skip

    def default(self) -> Decisions:
        return self.best_predicted(6_000)

    def _transform_cycles(self, rows: Array, columns: Array) -> Array:
        """Cycles of one tile of both operands: loads, additions, stores."""
        plan, lanes = self.plan, self.lanes
        first = 2.0 * plan.positions + additions([(m,) for m in plan.input_transform()])
        second = plan.positions + math.prod(plan.step)
        second += additions([(m,) for m in plan.result_transform()])
        vectors = rows * first * _BORDER + columns * second
        cycles: Array = vectors / lanes / machine.ISSUED_PER_CYCLE + 20
        return cycles


def _lanes(task: Task) -> int:
    return max(1, task.target.vector_bytes // ITEMSIZE["float32"])
