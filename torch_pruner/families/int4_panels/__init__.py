"""Products of many rows with weights of four bits: blocks of a panel are widened for all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.contraction.form import ContractionDecisions
from torch_pruner.families.int4_panels import form
from torch_pruner.families.kinds import is_int4_product

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class Int4PanelsFamily(Family):
    """See the module."""

    name = "int4_panels"
    decisions = ContractionDecisions

    def matches(self, task: Task) -> bool:
        return is_int4_product(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.int4_panels.space import Int4PanelsSketch

        return Int4PanelsSketch

    def parameters(self, spec: Graph, decisions: ContractionDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: ContractionDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.int4_panels.emit import emit

        return emit(spec, decisions, signature)


FAMILY = Int4PanelsFamily()
