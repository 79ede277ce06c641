"""Gradients of three-tap convolutions' weights by minimal filtering."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.filtered_gradient import form
from torch_pruner.families.filtered_gradient.form import FilteredGradientDecisions
from torch_pruner.families.kinds import is_product

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class FilteredGradientFamily(Family):
    """See the module."""

    name = "filtered_gradient"
    decisions = FilteredGradientDecisions

    def matches(self, task: Task) -> bool:
        return is_product(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.filtered_gradient.space import FilteredGradientSketch

        return FilteredGradientSketch

    def parameters(self, spec: Graph, decisions: FilteredGradientDecisions[int]) -> Parameters:
        return Parameters(scratch=form.scratch(spec, decisions))

    def emit(
        self,
        spec: Graph,
        decisions: FilteredGradientDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.filtered_gradient.emit import emit

        return emit(spec, decisions, signature)

    def operations(self, spec: Graph) -> int | None:
        plan = form.filtered_gradient_of(spec)
        return None if plan is None else plan.flops


FAMILY = FilteredGradientFamily()
