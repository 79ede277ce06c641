"""Emits kernels without reductions: one pass over the output, its innermost axis vectorised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import around_lines
from torch_pruner.codegen.parts.concatenation import joined_innermost, over_parts
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.sweeps import blocked, over_blocks, store_outputs
from torch_pruner.codegen.tir.builders import VECTORIZED, Expr, Stmt, loop
from torch_pruner.codegen.tir.reader import Index, Reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.elementwise.form import ElementwiseDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: ElementwiseDecisions[int], signature: Signature) -> Emitted:
    """TIR for a kernel without a reduction."""
    inputs, outputs, scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    shape = spec.nodes[spec.outputs[0]].shape

    def block(index: Callable[[Expr], Index], lanes: int) -> Stmt:
        return loop(
            lanes, lambda v: store_outputs(spec, reader, outputs, index(v)), VECTORIZED, "v"
        )

    if (cat := joined_innermost(spec)) is not None:

        def lines(count: int, vectors: int, body: Callable[[Expr], Stmt]) -> Stmt:
            return blocked(count, max(1, decisions.chunk // vectors), decisions.par, body)

        def one(index: Index) -> Stmt:
            return store_outputs(spec, reader, outputs, index)

        return Emitted(
            over_parts(spec, reader, cat, decisions.vl, one, lines), inputs, outputs, scratch
        )
    body = over_blocks(
        shape, decisions.vl, decisions.chunk, decisions.par, block, around_lines(spec, reader)
    )
    return Emitted(body, inputs, outputs, scratch)
