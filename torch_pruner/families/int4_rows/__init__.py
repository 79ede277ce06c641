"""Products of few rows with weights of four bits, which are widened in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.int4_rows import form
from torch_pruner.families.int4_rows.form import Int4RowsDecisions
from torch_pruner.families.kinds import is_int4_product

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.phases import Division
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class Int4RowsFamily(Family):
    """See the module."""

    name = "int4_rows"
    decisions = Int4RowsDecisions

    def matches(self, task: Task) -> bool:
        return is_int4_product(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.int4_rows.space import Int4RowsSketch

        return Int4RowsSketch

    def parameters(self, spec: Graph, decisions: Int4RowsDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def copies_first(self, spec: Graph, decisions: Int4RowsDecisions[int]) -> bool:
        return bool(form.parameters(spec, decisions).scratch)

    def division(self, spec: Graph, decisions: Int4RowsDecisions[int]) -> Division | None:
        return form.division(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: Int4RowsDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.int4_rows.emit import emit

        return emit(spec, decisions, signature)


FAMILY = Int4RowsFamily()
