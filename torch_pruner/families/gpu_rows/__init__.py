"""Rows on a GPU: threads of a block for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.gpu_rows import form
from torch_pruner.families.gpu_rows.form import GpuRowsDecisions
from torch_pruner.families.kinds import is_reduction

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class GpuRowsFamily(Family):
    """See the module."""

    name = "gpu_rows"
    target_kind = "cuda"
    decisions = GpuRowsDecisions

    def matches(self, task: Task) -> bool:
        return is_reduction(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.gpu_rows.space import GpuRowsSketch

        return GpuRowsSketch

    def parameters(self, spec: Graph, decisions: GpuRowsDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: GpuRowsDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.gpu_rows.emit import emit

        return emit(spec, decisions, signature, host=host)


FAMILY = GpuRowsFamily()
