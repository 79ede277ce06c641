"""Rows that replace those of a value, on a GPU: in its memory, or in a copy of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family
from torch_pruner.families.gpu_update.form import GpuUpdateDecisions
from torch_pruner.families.kinds import is_update
from torch_pruner.families.update.form import update_of

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class GpuUpdateFamily(Family):
    """See the module. What is added up stays with eager."""

    name = "gpu_update"
    target_kind = "cuda"
    decisions = GpuUpdateDecisions

    def matches(self, task: Task) -> bool:
        spec = task.spec
        return is_update(spec) and spec.nodes[update_of(spec)].op == "update"

    def space(self) -> type[Sketch]:
        from torch_pruner.families.gpu_update.space import GpuUpdateSketch

        return GpuUpdateSketch

    def emit(
        self,
        spec: Graph,
        decisions: GpuUpdateDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.gpu_update.emit import emit

        return emit(spec, decisions, signature, host=host)


FAMILY = GpuUpdateFamily()
