"""Attention on a GPU, written in Triton's language: see ``gpu_triton_product``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.triton import kernel
from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.gpu_attention.form import parameters
from torch_pruner.families.gpu_triton_attention.form import GpuTritonAttentionDecisions
from torch_pruner.families.kinds import is_attention, weights_are_scaled

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.codegen.parts.triton.kernel import TritonKernel
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class GpuTritonAttentionFamily(Family):
    """See the module."""

    name = "gpu_triton_attention"
    target_kind = "cuda"
    language = "triton"
    decisions = GpuTritonAttentionDecisions

    def matches(self, task: Task) -> bool:
        spec, card = task.spec, task.target.card
        if card is None or card.capability < (8, 0) or not kernel.available():
            return False
        return is_attention(spec) and not weights_are_scaled(spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.gpu_triton_attention.space import GpuTritonAttentionSketch

        return GpuTritonAttentionSketch

    def parameters(self, spec: Graph, decisions: GpuTritonAttentionDecisions[int]) -> Parameters:
        return parameters(spec, decisions.split)

    def emit(
        self,
        spec: Graph,
        decisions: GpuTritonAttentionDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.gpu_triton_attention.loops import emit

        return emit(spec, signature)

    def text(
        self, spec: Graph, decisions: GpuTritonAttentionDecisions[int], signature: Signature
    ) -> tuple[TritonKernel, ...]:
        from torch_pruner.families.gpu_triton_attention.emit import text

        return text(spec, decisions, signature)


FAMILY = GpuTritonAttentionFamily()
