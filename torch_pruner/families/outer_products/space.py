"""The space of sums of outer products, with the draft model's estimates for CPUs."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from torch_pruner.families.contraction.form import ContractionDecisions
from torch_pruner.families.contraction.packing import ROW_CYCLES
from torch_pruner.families.contraction.space import ContractionSketch
from torch_pruner.families.flow import FlowStep, Role
from torch_pruner.families.outer_products.form import OuterProductsDecisions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Array, Decisions, Mask


class OuterProductsSketch(ContractionSketch):
    """See the module; it costs what ``contraction`` does with both operands packed."""

    name = "outer_products"
    decisions: ClassVar[Any] = OuterProductsDecisions

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        found = dict(zip(ContractionDecisions._fields, super().domains, strict=True))
        return tuple(found[name] for name in self.names)

    def columns(self, decisions: Decisions) -> ContractionDecisions[Array]:
        own = dict(zip(self.names, decisions.astype(np.float64).T, strict=True))
        count = len(decisions)
        return ContractionDecisions(**own, pack=np.ones(count), ahead=np.zeros(count))

    def _far_rows(self, c: ContractionDecisions[Array]) -> Array:
        return np.zeros(np.shape(c.tm))

    def _preparation(self, c: ContractionDecisions[Array], widened: Mask) -> Array:
        """Seconds for both copies."""
        con, target = self.con, self.task.target
        cores = np.where(c.par == 1, self.task.threads, 1)
        cycles = con.groups * con.rows * con.depth * ROW_CYCLES
        return (
            super()._preparation(c, np.zeros_like(widened)) + cycles / cores / target.frequency_hz
        )

    def flow(self, decisions: Decisions) -> Sequence[FlowStep]:
        size = float(self.itemsize)
        moved = self.con.groups * self.con.rows * self.con.depth * size
        return [*super().flow(decisions), FlowStep(Role.COPY, size, 2 * moved, moved, moved, moved)]
