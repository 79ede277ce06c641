"""Emits windows and short reductions for a GPU: one thread per output element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.sweeps import over_threads
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.reductions import column_block
from torch_pruner.codegen.tir.reader import Reader

if TYPE_CHECKING:
    from torch_pruner.codegen.tir.builders import Stmt
    from torch_pruner.codegen.tir.reader import Index
    from torch_pruner.families.gpu_columns.form import GpuColumnsDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(
    spec: Graph,
    decisions: GpuColumnsDecisions[int],
    signature: Signature,
    *,
    host: bool = False,
) -> Emitted:
    """TIR for windows, and for reductions over outer axes."""
    inputs, outputs, scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    block = column_block(spec, reader, outputs, abreast=False)

    def one(index: Index) -> Stmt:
        return block(lambda _: index, 1)

    body = over_threads(spec, 1, decisions.threads, one, host=host)
    return Emitted(body, inputs, outputs, scratch)
