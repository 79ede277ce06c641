"""The space of updates: rows are few, what they are written into may be large."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.space import Array
from torch_pruner.families.sweeps import Sweep
from torch_pruner.families.update.form import UpdateDecisions, update_of

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions, Symbols


class UpdateSketch(Sweep[UpdateDecisions[Array]]):
    """Updates, in place or of a copy."""

    name = "update"
    decisions = UpdateDecisions

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        return tuple(
            np.array(d, dtype=np.int64) for d in ([self.vl], self._chunks(), self._parallel())
        )

    def symbols(self, decisions: Decisions) -> Symbols:
        spec = self.task.spec
        cycles = 2.0 + machine.pointwise_cycles(spec, set(range(len(spec.nodes))))
        if self._adds:
            cycles = self._added_cycles()
        return self._estimate(decisions, cycles, self.steps, self._written())

    @property
    def _adds(self) -> bool:
        return self.task.spec.nodes[update_of(self.task.spec)].op == "accumulate"

    def _added_cycles(self) -> float:
        """Of a vector of columns: every row that is added, and every line that is copied."""
        spec = self.task.spec
        update = spec.nodes[update_of(spec)]
        places = spec.nodes[update.inputs[2]].numel
        copied = spec.nodes[update.inputs[0]].numel / (self.steps * self.vl)
        each = 4.0 + machine.pointwise_cycles(spec, set(range(len(spec.nodes))))
        return places * each + copied * 2.0

    def _written(self) -> int:
        nodes = self.task.spec.nodes
        update = nodes[update_of(self.task.spec)]
        if self._adds:
            return nodes[update.inputs[1]].numel + update.numel
        return nodes[update.inputs[1]].numel + (0 if update.attr("in_place") else update.numel)

    def _steps(self) -> int:
        """Vectors of one row of every line along which rows lie: what tasks share out."""
        nodes = self.task.spec.nodes
        update = nodes[update_of(self.task.spec)]
        if self._adds:
            return self._columns() // self.vl
        if not update.attr("in_place"):
            return update.numel // self.vl
        index = math.prod(nodes[update.inputs[2]].shape)
        return nodes[update.inputs[1]].numel // (index * self.vl)

    def _columns(self) -> int:
        """Of a row that is added."""
        nodes = self.task.spec.nodes
        update = nodes[update_of(self.task.spec)]
        return nodes[update.inputs[1]].numel // max(nodes[update.inputs[2]].numel, 1)

    def _moved(self) -> float:
        nodes = self.task.spec.nodes
        update = nodes[update_of(self.task.spec)]
        rows = 2.0 * nodes[update.inputs[1]].nbytes
        return rows if not self._adds and update.attr("in_place") else rows + 2.0 * update.nbytes
