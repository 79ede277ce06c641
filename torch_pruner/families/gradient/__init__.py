"""Gradients of convolutions' weights, operands channels last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.gradient import form
from torch_pruner.families.gradient.form import GradientDecisions
from torch_pruner.families.kinds import is_product

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class GradientFamily(Family):
    """See the module."""

    name = "gradient"
    decisions = GradientDecisions

    def matches(self, task: Task) -> bool:
        return is_product(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.gradient.space import GradientSketch

        return GradientSketch

    def parameters(self, spec: Graph, decisions: GradientDecisions[int]) -> Parameters:
        return Parameters(scratch=form.scratch(spec, decisions))

    def emit(
        self,
        spec: Graph,
        decisions: GradientDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.gradient.emit import emit

        return emit(spec, decisions, signature)


FAMILY = GradientFamily()
