"""Kernels without a reduction: one pass over the output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family
from torch_pruner.families.elementwise.form import ElementwiseDecisions
from torch_pruner.families.kinds import is_elementwise

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class ElementwiseFamily(Family):
    """See the module."""

    name = "elementwise"
    decisions = ElementwiseDecisions
    one_pass = True

    def matches(self, task: Task) -> bool:
        return is_elementwise(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.elementwise.space import ElementwiseSketch

        return ElementwiseSketch

    def emit(
        self,
        spec: Graph,
        decisions: ElementwiseDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.elementwise.emit import emit

        return emit(spec, decisions, signature)


FAMILY = ElementwiseFamily()
