"""Products on a GPU with little to share: one thread per output element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family
from torch_pruner.families.gpu_direct.form import GpuDirectDecisions
from torch_pruner.families.kinds import is_contraction

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class GpuDirectFamily(Family):
    """See the module."""

    name = "gpu_direct"
    target_kind = "cuda"
    decisions = GpuDirectDecisions

    def matches(self, task: Task) -> bool:
        return is_contraction(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.gpu_direct.space import GpuDirectSketch

        return GpuDirectSketch

    def emit(
        self,
        spec: Graph,
        decisions: GpuDirectDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.gpu_direct.emit import emit

        return emit(spec, decisions, signature, host=host)


FAMILY = GpuDirectFamily()
