"""Products of few rows that add up rows of the second operand where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.axpy.form import AxpyDecisions
from torch_pruner.families.base import Family
from torch_pruner.families.kinds import is_product

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class AxpyFamily(Family):
    """See the module."""

    name = "axpy"
    decisions = AxpyDecisions

    def matches(self, task: Task) -> bool:
        return is_product(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.axpy.space import AxpySketch

        return AxpySketch

    def emit(
        self,
        spec: Graph,
        decisions: AxpyDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.axpy.emit import emit

        return emit(spec, decisions, signature)


FAMILY = AxpyFamily()
