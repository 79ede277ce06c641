"""Matmul and convolution on a GPU: tiles in shared memory, sums in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.gpu_product import form
from torch_pruner.families.gpu_product.form import GpuProductDecisions
from torch_pruner.families.kinds import (
    has_one_dtype,
    is_contraction,
    is_depthwise,
    is_int4_product,
)

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class GpuProductFamily(Family):
    """See the module."""

    name = "gpu_product"
    target_kind = "cuda"
    decisions = GpuProductDecisions

    def matches(self, task: Task) -> bool:
        spec = task.spec
        if is_int4_product(spec):
            return form.has_narrow_weights(spec)
        tiled = is_contraction(spec) and not is_depthwise(spec, constant=False)
        return tiled and (has_one_dtype(spec) or form.has_narrow_weights(spec))

    def space(self) -> type[Sketch]:
        from torch_pruner.families.gpu_product.space import GpuProductSketch

        return GpuProductSketch

    def parameters(self, spec: Graph, decisions: GpuProductDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: GpuProductDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.gpu_product.emit import emit

        return emit(spec, decisions, signature, host=host)


FAMILY = GpuProductFamily()
