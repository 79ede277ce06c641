"""The steps of recurrent layers, each a product of few rows with gates behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.kinds import is_recurrence
from torch_pruner.families.recurrence import form
from torch_pruner.families.recurrence.form import RecurrenceDecisions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class RecurrenceFamily(Family):
    """See the module."""

    name = "recurrence"
    decisions = RecurrenceDecisions

    def matches(self, task: Task) -> bool:
        return is_recurrence(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.recurrence.space import RecurrenceSketch

        return RecurrenceSketch

    def parameters(self, spec: Graph, decisions: RecurrenceDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def serial(self, decisions: Mapping[str, int]) -> bool:
        return not decisions["spread"]

    def emit(
        self,
        spec: Graph,
        decisions: RecurrenceDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.recurrence.emit import emit

        return emit(spec, decisions, signature)


FAMILY = RecurrenceFamily()
