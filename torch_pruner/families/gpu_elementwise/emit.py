"""Emits kernels without reductions for a GPU: neighbouring elements to neighbouring threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.sweeps import over_threads
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.sweeps import store_outputs
from torch_pruner.codegen.tir.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.codegen.tir.builders import Stmt
    from torch_pruner.codegen.tir.reader import Index
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(
    spec: Graph, decisions: Mapping[str, int], takes: Signature, *, host: bool = False
) -> Emitted:
    """Decisions: ``vl`` neighbouring elements per thread, ``threads`` per block."""
    inputs, outputs, scratch = parameters(takes)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))

    def one(index: Index) -> Stmt:
        return store_outputs(spec, reader, outputs, index)

    return Emitted(over_threads(spec, decisions, one, host=host), inputs, outputs, scratch)
