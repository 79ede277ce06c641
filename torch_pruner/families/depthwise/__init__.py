"""Depthwise and grouped convolutions: vectors of channels, tiles of positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.depthwise import form
from torch_pruner.families.depthwise.form import DepthwiseDecisions
from torch_pruner.families.kinds import has_narrow_groups, is_channelwise, is_depthwise

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class DepthwiseFamily(Family):
    """See the module."""

    name = "depthwise"
    decisions = DepthwiseDecisions

    def matches(self, task: Task) -> bool:
        spec = task.spec
        return is_depthwise(spec, constant=True) or is_channelwise(spec) or has_narrow_groups(spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.depthwise.space import DepthwiseSketch

        return DepthwiseSketch

    def parameters(self, spec: Graph, decisions: DepthwiseDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: DepthwiseDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.depthwise.emit import emit

        return emit(spec, decisions, signature)


FAMILY = DepthwiseFamily()
