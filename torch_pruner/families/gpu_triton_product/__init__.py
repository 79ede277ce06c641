"""Matmul and convolution on a GPU, written in Triton's language: Triton's compiler finds the tensor
cores' instructions of each card (``mma``, ``wgmma``, ``tcgen05``) and the copies that feed them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.triton import kernel
from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.gpu_triton_product import form
from torch_pruner.families.gpu_triton_product.form import GpuTritonProductDecisions
from torch_pruner.families.kinds import has_one_dtype, is_contraction, is_depthwise

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.codegen.parts.triton.kernel import TritonKernel
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class GpuTritonProductFamily(Family):
    """See the module."""

    name = "gpu_triton_product"
    target_kind = "cuda"
    language = "triton"
    decisions = GpuTritonProductDecisions

    def matches(self, task: Task) -> bool:
        spec, card = task.spec, task.target.card
        if card is None or card.capability < (8, 0) or not kernel.available():
            return False
        if not is_contraction(spec) or is_depthwise(spec, constant=False):
            return False
        return has_one_dtype(spec) and form.in_tensor_cores(spec, card)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.gpu_triton_product.space import GpuTritonProductSketch

        return GpuTritonProductSketch

    def parameters(self, spec: Graph, decisions: GpuTritonProductDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: GpuTritonProductDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.gpu_triton_product.loops import emit

        return emit(spec, decisions, signature)

    def text(
        self, spec: Graph, decisions: GpuTritonProductDecisions[int], signature: Signature
    ) -> tuple[TritonKernel, ...]:
        from torch_pruner.families.gpu_triton_product.emit import text

        return text(spec, decisions, signature)


FAMILY = GpuTritonProductFamily()
