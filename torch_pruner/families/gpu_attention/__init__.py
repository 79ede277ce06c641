"""Attention on a GPU: scores stay in a block's shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.gpu_attention import form
from torch_pruner.families.gpu_attention.form import GpuAttentionDecisions
from torch_pruner.families.kinds import is_attention, weights_are_scaled

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class GpuAttentionFamily(Family):
    """See the module."""

    name = "gpu_attention"
    target_kind = "cuda"
    decisions = GpuAttentionDecisions

    def matches(self, task: Task) -> bool:
        return is_attention(task.spec) and not weights_are_scaled(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.gpu_attention.space import GpuAttentionSketch

        return GpuAttentionSketch

    def parameters(self, spec: Graph, decisions: GpuAttentionDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions.split)

    def emit(
        self,
        spec: Graph,
        decisions: GpuAttentionDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.gpu_attention.emit import emit

        return emit(spec, decisions, signature, host=host)


FAMILY = GpuAttentionFamily()
