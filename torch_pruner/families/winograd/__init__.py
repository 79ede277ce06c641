"""Convolutions of two or three taps by minimal filtering, F(2, 2) and F(2, 3).

``winograd4`` is F(4, 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.kinds import is_product
from torch_pruner.families.winograd import form
from torch_pruner.families.winograd.form import WinogradDecisions
from torch_pruner.families.winograd.matrices import RESULTS

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class WinogradFamily(Family):
    """See the module."""

    name = "winograd"
    decisions = WinogradDecisions
    results: ClassVar[int] = RESULTS
    """Of a tile, along each dimension of three taps."""

    def matches(self, task: Task) -> bool:
        return is_product(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.winograd.space import WinogradSketch

        return WinogradSketch

    def parameters(self, spec: Graph, decisions: WinogradDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions, self.results)

    def emit(
        self,
        spec: Graph,
        decisions: WinogradDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.winograd.emit import emit

        return emit(spec, decisions, signature, self.results)

    def operations(self, spec: Graph) -> int | None:
        plan = form.winograd_of(spec, self.results)
        return None if plan is None else plan.flops


FAMILY = WinogradFamily()
