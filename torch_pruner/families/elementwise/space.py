"""The space of kernels without a reduction."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.elementwise.form import ElementwiseDecisions
from torch_pruner.families.space import Array
from torch_pruner.families.sweeps import GATHERED_CYCLES, Sweep
from torch_pruner.graph.strided import reads_apart

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions, Symbols


class ElementwiseSketch(Sweep[ElementwiseDecisions[Array]]):
    """Kernels without a reduction."""

    name = "elementwise"
    decisions = ElementwiseDecisions

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        return tuple(
            np.array(d, dtype=np.int64) for d in ([self.vl], self._chunks(), self._parallel())
        )

    @cached_property
    def _apart(self) -> int:
        return reads_apart(self.task.spec, self.vl)

    def symbols(self, decisions: Decisions) -> Symbols:
        spec = self.task.spec
        cycles = (
            1.0 + machine.pointwise_cycles(spec, set(range(len(spec.nodes)))) + len(spec.inputs)
        )
        cycles += self._apart * self.vl * GATHERED_CYCLES
        return self._estimate(decisions, cycles, self.steps, spec.nodes[spec.outputs[0]].numel)
