"""Products of few rows on a GPU: the weights are read once, where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.gpu_dots import form
from torch_pruner.families.gpu_dots.form import GpuDotsDecisions
from torch_pruner.families.kinds import is_contraction, is_int4_product

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class GpuDotsFamily(Family):
    """See the module."""

    name = "gpu_dots"
    target_kind = "cuda"
    decisions = GpuDotsDecisions

    def matches(self, task: Task) -> bool:
        product = is_contraction(task.spec) or is_int4_product(task.spec)
        return product and form.fits(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.gpu_dots.space import GpuDotsSketch

        return GpuDotsSketch

    def parameters(self, spec: Graph, decisions: GpuDotsDecisions[int]) -> Parameters:
        return form.parameters(spec)

    def emit(
        self,
        spec: Graph,
        decisions: GpuDotsDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.gpu_dots.emit import emit

        return emit(spec, decisions, signature, host=host)


FAMILY = GpuDotsFamily()
