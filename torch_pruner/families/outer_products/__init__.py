"""Matmul whose first operand has its rows for neighbours, as gradients of weights have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.kinds import is_product
from torch_pruner.families.outer_products import form
from torch_pruner.families.outer_products.form import OuterProductsDecisions

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class OuterProductsFamily(Family):
    """See the module."""

    name = "outer_products"
    decisions = OuterProductsDecisions

    def matches(self, task: Task) -> bool:
        return is_product(task.spec) and form.is_outer(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.outer_products.space import OuterProductsSketch

        return OuterProductsSketch

    def parameters(self, spec: Graph, decisions: OuterProductsDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: OuterProductsDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.outer_products.emit import emit

        return emit(spec, decisions, signature)


FAMILY = OuterProductsFamily()
