"""Products of bytes by constant bytes with instructions that sum neighbours along the reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.int8_products import form
from torch_pruner.families.int8_products.form import Int8ProductsDecisions
from torch_pruner.families.kinds import is_product

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.phases import Division
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class Int8ProductsFamily(Family):
    """See the module."""

    name = "int8_products"
    decisions = Int8ProductsDecisions

    def matches(self, task: Task) -> bool:
        return is_product(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.int8_products.space import Int8ProductsSketch

        return Int8ProductsSketch

    def parameters(self, spec: Graph, decisions: Int8ProductsDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def copies_first(self, spec: Graph, decisions: Int8ProductsDecisions[int]) -> bool:
        return True

    def division(self, spec: Graph, decisions: Int8ProductsDecisions[int]) -> Division | None:
        return form.division(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: Int8ProductsDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.int8_products.emit import emit

        return emit(spec, decisions, signature)


FAMILY = Int8ProductsFamily()
