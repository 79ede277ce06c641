"""The space of rows that vector lanes reduce."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.rows.form import RowsDecisions, parted_axis, swept_line
from torch_pruner.families.space import Array
from torch_pruner.families.sweeps import (
    GATHERED_CYCLES,
    PLACES,
    Sweep,
    inner_axis_kept,
    whole_nodes,
)
from torch_pruner.graph.rows import RowDomain, passes, row_domain

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions, Mask, Symbols

# Measured on an AMD Zen 4: a core that reads one stream of memory takes so many times as long as
# one that reads four (30 and 36 GB/s of two cores).
ONE_STREAM = 1.2
LOCATING_LATENCY = 8.0  # of a comparison and two choices, besides: one waits for the other
MANY_PAGES = 16  # of a row: the parts of a shorter one are hardly streams


class RowsSketch(Sweep[RowsDecisions[Array]]):
    """Rows reduced by vector lanes; ``lanes`` vectors accumulate side by side."""

    name = "rows"
    decisions = RowsDecisions

    @cached_property
    def rows(self) -> RowDomain:
        return row_domain(self.task.spec)

    def _steps(self) -> int:
        return self.rows.rows

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        width = swept_line(self.task.spec, self.vl)
        lanes = [n for n in (1, 2, 4) if n * self.vl <= width] or [1]
        return tuple(
            np.array(d, dtype=np.int64)
            for d in ([self.vl], lanes, self._chunks(), self._parallel(), [0, 1])
        )

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        spec, lanes = self.task.spec, self.domains[1]
        parted = [n for n in lanes if n > 1 and parted_axis(spec, int(n), self.vl) is not None]
        result: Mask = super().valid(decisions) & ((c.apart == 0) | np.isin(c.lanes, parted))
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        spec, rows = self.task.spec, self.rows
        lanes = self.columns(decisions).lanes
        vectors = math.ceil(rows.width / self.vl)
        ops = machine.pointwise_cycles(spec, set(range(len(spec.nodes))))
        places = sum(spec.nodes[r].op in PLACES for r in rows.reductions)
        folds = len(rows.reductions)
        across = inner_axis_kept(spec) and len(rows.axes) < len(rows.shape)
        gather = self.vl * 1.0 if across else 1.0
        serial = folds * np.maximum(machine.FMA_LATENCY / lanes, 1.0)
        serial += places * np.maximum(LOCATING_LATENCY / lanes, 2.0)
        serial *= gather
        tail = folds * (10 + lanes * self.vl)
        line = swept_line(spec, self.vl)
        scalar_rest = rows.width // line * (line % self.vl) * (folds + ops)
        whole = whole_nodes(spec, rows)
        reads, writes = (sum(i in whole for i in ends) for ends in (spec.inputs, spec.outputs))
        touched = (reads * len(passes(spec)) + writes) * self.vl if across else 0.0
        each = ops + serial + 2 + touched * GATHERED_CYCLES
        cycles = vectors * each + tail + scalar_rest
        work = float(rows.rows * rows.width * folds)
        found = self._estimate(decisions, cycles, self.steps, work)
        row_bytes = self._moved() / max(rows.rows, 1)
        if self._moved() <= self.task.target.l3_bytes or row_bytes < MANY_PAGES * machine.PAGE:
            return found
        apart = self.columns(decisions).apart == 1
        return replace(found, latency_s=found.latency_s * np.where(apart, 1.0, ONE_STREAM))
