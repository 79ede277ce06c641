"""Products of few rows with weights of twelve bits, which become floats in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.coded_rows import form
from torch_pruner.families.in_place.form import InPlaceDecisions, division, scratch
from torch_pruner.families.kinds import is_product

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.phases import Division
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class CodedRowsFamily(Family):
    """See the module."""

    name = "coded_rows"
    decisions = InPlaceDecisions

    def matches(self, task: Task) -> bool:
        return is_product(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.coded_rows.space import CodedRowsSketch

        return CodedRowsSketch

    def parameters(self, spec: Graph, decisions: InPlaceDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions.vl)

    def copies_first(self, spec: Graph, decisions: InPlaceDecisions[int]) -> bool:
        return bool(scratch(spec))

    def division(self, spec: Graph, decisions: InPlaceDecisions[int]) -> Division | None:
        return division(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: InPlaceDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.coded_rows.reading import coded_reading, within
        from torch_pruner.families.in_place.emit import emit

        emitted = emit(spec, decisions, signature, coded_reading)
        emitted.body = within(emitted.body, decisions.vl)
        return emitted


FAMILY = CodedRowsFamily()
