"""Gradients of depthwise convolutions' weights, operands channels last: vectors of channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.depthwise_gradient import form
from torch_pruner.families.depthwise_gradient.form import DepthwiseGradientDecisions
from torch_pruner.families.kinds import is_depthwise_gradient

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class DepthwiseGradientFamily(Family):
    """See the module."""

    name = "depthwise_gradient"
    decisions = DepthwiseGradientDecisions

    def matches(self, task: Task) -> bool:
        return is_depthwise_gradient(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.depthwise_gradient.space import DepthwiseGradientSketch

        return DepthwiseGradientSketch

    def parameters(self, spec: Graph, decisions: DepthwiseGradientDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: DepthwiseGradientDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.depthwise_gradient.emit import emit

        return emit(spec, decisions, signature)


FAMILY = DepthwiseGradientFamily()
