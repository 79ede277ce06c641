"""Kernels without a reduction on a GPU: neighbouring elements to neighbouring threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family
from torch_pruner.families.gpu_elementwise.form import GpuElementwiseDecisions
from torch_pruner.families.kinds import is_elementwise

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class GpuElementwiseFamily(Family):
    """See the module."""

    name = "gpu_elementwise"
    target_kind = "cuda"
    decisions = GpuElementwiseDecisions

    def matches(self, task: Task) -> bool:
        return is_elementwise(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.gpu_elementwise.space import GpuElementwiseSketch

        return GpuElementwiseSketch

    def emit(
        self,
        spec: Graph,
        decisions: GpuElementwiseDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.gpu_elementwise.emit import emit

        return emit(spec, decisions, signature, host=host)


FAMILY = GpuElementwiseFamily()
