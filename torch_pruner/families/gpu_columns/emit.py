"""Emits windows and short reductions for a GPU: one thread per output element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.sweeps import over_threads
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.reductions import column_block
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
    """Windows, and reductions over outer axes. Decisions: ``threads`` per block."""
    inputs, outputs, scratch = parameters(takes)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    block = column_block(spec, reader, outputs)

    def one(index: Index) -> Stmt:
        return block(lambda _: index, 1)

    return Emitted(
        over_threads(spec, {**decisions, "vl": 1}, one, host=host), inputs, outputs, scratch
    )
