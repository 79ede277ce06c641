"""Convolutions whose channels lie in planes: lanes are positions, rows are output channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.kinds import in_planes
from torch_pruner.families.planar import form
from torch_pruner.families.planar.form import PlanarDecisions

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class PlanarFamily(Family):
    """See the module."""

    name = "planar"
    decisions = PlanarDecisions

    def matches(self, task: Task) -> bool:
        return in_planes(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.planar.space import PlanarSketch

        return PlanarSketch

    def parameters(self, spec: Graph, decisions: PlanarDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: PlanarDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.planar.emit import emit

        return emit(spec, decisions, signature)


FAMILY = PlanarFamily()
