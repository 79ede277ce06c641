"""Products and convolutions of any form: packed panels, register tiles, fused epilogues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.contraction import form
from torch_pruner.families.contraction.form import ContractionDecisions
from torch_pruner.families.kinds import is_product

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.phases import Division
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class ContractionFamily(Family):
    """See the module."""

    name = "contraction"
    decisions = ContractionDecisions

    def matches(self, task: Task) -> bool:
        return is_product(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.contraction.space import ContractionSketch

        return ContractionSketch

    def parameters(self, spec: Graph, decisions: ContractionDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def copies_first(self, spec: Graph, decisions: ContractionDecisions[int]) -> bool:
        return form.only_copies(spec, decisions)

    def division(self, spec: Graph, decisions: ContractionDecisions[int]) -> Division | None:
        return form.division(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: ContractionDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.contraction.emit import emit

        return emit(spec, decisions, signature)


FAMILY = ContractionFamily()
