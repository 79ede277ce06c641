"""Rows reduced by vector lanes, pass by pass, and finished in cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.kinds import is_reduction
from torch_pruner.families.rows import form
from torch_pruner.families.rows.form import RowsDecisions

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class RowsFamily(Family):
    """See the module."""

    name = "rows"
    decisions = RowsDecisions

    def matches(self, task: Task) -> bool:
        return is_reduction(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.rows.space import RowsSketch

        return RowsSketch

    def parameters(self, spec: Graph, decisions: RowsDecisions[int]) -> Parameters:
        return Parameters(scratch=form.scratch(spec, decisions))

    def emit(
        self,
        spec: Graph,
        decisions: RowsDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.rows.emit import emit

        return emit(spec, decisions, signature)


FAMILY = RowsFamily()
