"""Emits kernels without reductions for a GPU: neighbouring elements to neighbouring threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.sweeps import over_threads
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.sweeps import store_outputs
from torch_pruner.codegen.tir.reader import Reader

if TYPE_CHECKING:
    from torch_pruner.codegen.tir.builders import Stmt
    from torch_pruner.codegen.tir.reader import Index
    from torch_pruner.families.gpu_elementwise.form import GpuElementwiseDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(
    spec: Graph,
    decisions: GpuElementwiseDecisions[int],
    signature: Signature,
    *,
    host: bool = False,
) -> Emitted:
    """TIR for a kernel without reductions."""
    inputs, outputs, scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))

    def one(index: Index) -> Stmt:
        return store_outputs(spec, reader, outputs, index)

    body = over_threads(spec, decisions.vl, decisions.threads, one, host=host)
    return Emitted(body, inputs, outputs, scratch)
