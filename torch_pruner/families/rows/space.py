"""The space of rows that vector lanes reduce."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.rows.form import RowsDecisions
from torch_pruner.families.space import Array
from torch_pruner.families.sweeps import (
    GATHERED_CYCLES,
    Sweep,
    inner_axis_kept,
    whole_nodes,
)
from torch_pruner.graph.rows import RowDomain, passes, row_domain

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions, Symbols


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
        width = self.rows.shape[self.rows.axes[-1]]
        lanes = [n for n in (1, 2, 4) if n * self.vl <= width] or [1]
        return tuple(
            np.array(d, dtype=np.int64)
            for d in ([self.vl], lanes, self._chunks(), self._parallel())
        )

    def symbols(self, decisions: Decisions) -> Symbols:
        spec, rows = self.task.spec, self.rows
        lanes = self.columns(decisions).lanes
        vectors = math.ceil(rows.width / self.vl)
        ops = machine.pointwise_cycles(spec, set(range(len(spec.nodes))))
        folds = len(rows.reductions)
        across = inner_axis_kept(self.task) and len(rows.axes) < len(rows.shape)
        gather = self.vl * 1.0 if across else 1.0
        serial = folds * np.maximum(machine.FMA_LATENCY / lanes, 1.0) * gather
        tail = folds * (10 + lanes * self.vl)
        scalar_rest = (rows.shape[rows.axes[-1]] % self.vl) * (folds + ops) / max(vectors, 1)
        whole = whole_nodes(spec, rows)
        reads, writes = (sum(i in whole for i in ends) for ends in (spec.inputs, spec.outputs))
        touched = (reads * len(passes(spec)) + writes) * self.vl if across else 0.0
        each = ops + serial + 2 + touched * GATHERED_CYCLES
        cycles = vectors * each + tail + scalar_rest
        return self._estimate(decisions, cycles, self.steps, float(rows.rows * rows.width * folds))
