"""Rows that replace those of a value: a copy of the value first, or nothing but the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family
from torch_pruner.families.kinds import is_update
from torch_pruner.families.update.form import UpdateDecisions

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class UpdateFamily(Family):
    """See the module."""

    name = "update"
    decisions = UpdateDecisions

    def matches(self, task: Task) -> bool:
        return is_update(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.update.space import UpdateSketch

        return UpdateSketch

    def emit(
        self,
        spec: Graph,
        decisions: UpdateDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.update.emit import emit

        return emit(spec, decisions, signature)


FAMILY = UpdateFamily()
