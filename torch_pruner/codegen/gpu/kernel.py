"""From a kernel graph and decisions to a GPU kernel: the dispatcher over the emitters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen._tvm import T, indexing
from torch_pruner.codegen.gpu import attention, direct, product, rows, sweeps
from torch_pruner.codegen.kernel import ScheduledKernel, index_dtype_of
from torch_pruner.graph.signature import signature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.ir import Graph

EMITTERS = {
    "gpu_elementwise": sweeps.emit_elementwise,
    "gpu_columns": sweeps.emit_columns,
    "gpu_direct": direct.emit,
    "gpu_rows": rows.emit_rows,
    "gpu_product": product.emit,
    "gpu_attention": attention.emit,
}


def schedule(
    spec: Graph, sketch: str, decisions: Mapping[str, int], *, host: bool = False
) -> ScheduledKernel:
    """Emit ``spec`` as the named sketch; ``host``: the same schedule as loops, for any CPU.

    Raises ``KeyError`` for an unknown sketch.
    """
    takes = signature(spec, sketch, decisions)
    with indexing(index_dtype_of(spec, takes)):
        emit = EMITTERS[sketch](spec, decisions, takes, host=host)
    buffers = [*emit.inputs, *emit.outputs, *emit.scratch]
    func = T.PrimFunc(buffers, emit.body).with_attr(
        {"global_symbol": "kernel", "tirx.noalias": True}
    )
    return ScheduledKernel(func, takes.inputs, takes.outputs, takes.scratch, takes.packs)
