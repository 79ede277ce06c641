"""Reductions over outer axes, and windows: an accumulator for each output element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family
from torch_pruner.families.columns.form import ColumnsDecisions
from torch_pruner.families.kinds import ends_reduced, is_window

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class ColumnsFamily(Family):
    """See the module."""

    name = "columns"
    decisions = ColumnsDecisions

    def matches(self, task: Task) -> bool:
        return is_window(task.spec) or ends_reduced(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.columns.space import ColumnsSketch

        return ColumnsSketch

    def emit(
        self,
        spec: Graph,
        decisions: ColumnsDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.columns.emit import emit

        return emit(spec, decisions, signature)


FAMILY = ColumnsFamily()
