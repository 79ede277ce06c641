"""Products of few rows that read the second operand where it lies, along the reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.in_place import form
from torch_pruner.families.in_place.form import InPlaceDecisions
from torch_pruner.families.kinds import is_product

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.phases import Division
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class InPlaceFamily(Family):
    """See the module."""

    name = "in_place"
    decisions = InPlaceDecisions

    def matches(self, task: Task) -> bool:
        return is_product(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.in_place.space import InPlaceSketch

        return InPlaceSketch

    def parameters(self, spec: Graph, decisions: InPlaceDecisions[int]) -> Parameters:
        return Parameters(scratch=form.scratch(spec))

    def copies_first(self, spec: Graph, decisions: InPlaceDecisions[int]) -> bool:
        return bool(form.scratch(spec))

    def division(self, spec: Graph, decisions: InPlaceDecisions[int]) -> Division | None:
        return form.division(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: InPlaceDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.in_place.emit import emit

        return emit(spec, decisions, signature)


FAMILY = InPlaceFamily()
