"""Matmul and convolution on a GPU whose warpgroups multiply from shared memory (capability 9.0)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.gpu_product.form import has_narrow_weights
from torch_pruner.families.gpu_warpgroup import form
from torch_pruner.families.gpu_warpgroup.form import GpuWarpgroupDecisions
from torch_pruner.families.kinds import (
    has_one_dtype,
    is_contraction,
    is_depthwise,
    is_int4_product,
)
from torch_pruner.graph.contraction import contraction_of

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class GpuWarpgroupFamily(Family):
    """See the module."""

    name = "gpu_warpgroup"
    target_kind = "cuda"
    decisions = GpuWarpgroupDecisions

    def matches(self, task: Task) -> bool:
        spec, card = task.spec, task.target.card
        if card is None or not card.has_warpgroup_products:
            return False
        if is_int4_product(spec):
            return has_narrow_weights(spec)
        if not is_contraction(spec) or is_depthwise(spec, constant=False):
            return False
        halves = spec.nodes[contraction_of(spec).a].dtype in ("float16", "bfloat16")
        return halves and (has_one_dtype(spec) or has_narrow_weights(spec))

    def space(self) -> type[Sketch]:
        from torch_pruner.families.gpu_warpgroup.space import GpuWarpgroupSketch

        return GpuWarpgroupSketch

    def parameters(self, spec: Graph, decisions: GpuWarpgroupDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: GpuWarpgroupDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.gpu_warpgroup.emit import emit

        return emit(spec, decisions, signature, host=host)


FAMILY = GpuWarpgroupFamily()
