"""Windows and short reductions on a GPU: one thread per output element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family
from torch_pruner.families.gpu_columns.form import GpuColumnsDecisions
from torch_pruner.families.kinds import ends_reduced, is_window

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class GpuColumnsFamily(Family):
    """See the module."""

    name = "gpu_columns"
    target_kind = "cuda"
    decisions = GpuColumnsDecisions

    def matches(self, task: Task) -> bool:
        return is_window(task.spec) or ends_reduced(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.gpu_columns.space import GpuColumnsSketch

        return GpuColumnsSketch

    def emit(
        self,
        spec: Graph,
        decisions: GpuColumnsDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.gpu_columns.emit import emit

        return emit(spec, decisions, signature, host=host)


FAMILY = GpuColumnsFamily()
