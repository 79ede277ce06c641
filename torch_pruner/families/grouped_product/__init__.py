"""Rows in groups, each group times a matrix of its own, as experts of a mixture have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family
from torch_pruner.families.grouped_product.form import GroupedProductDecisions
from torch_pruner.families.kinds import is_grouped

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class GroupedProductFamily(Family):
    """See the module."""

    name = "grouped_product"
    decisions = GroupedProductDecisions

    def matches(self, task: Task) -> bool:
        return is_grouped(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.grouped_product.space import GroupedProductSketch

        return GroupedProductSketch

    def emit(
        self,
        spec: Graph,
        decisions: GroupedProductDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.grouped_product.emit import emit

        return emit(spec, decisions, signature)


FAMILY = GroupedProductFamily()
