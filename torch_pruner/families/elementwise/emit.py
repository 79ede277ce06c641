"""Emits kernels without reductions: one pass over the output, its innermost axis vectorised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import around_lines
from torch_pruner.codegen.parts.concatenation import joined_innermost, over_parts
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.runs import in_runs
from torch_pruner.codegen.parts.sweeps import blocked, over_blocks, store_outputs
from torch_pruner.codegen.tir.builders import VECTORIZED, Expr, Stmt, loop
from torch_pruner.codegen.tir.reader import Index, Reader, imm, unlinear

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

    around = around_lines(spec, reader)
    joined = joined_innermost(spec)
    if joined is not None and (joined[1] == -1 or around is None):

        def begins(p: Expr) -> list[tuple[int, Index]]:
            return [(o, (*unlinear(p, shape[:-1]), imm(0))) for o in spec.outputs]

        def lines(count: int, vectors: int, body: Callable[[Expr], Stmt]) -> Stmt:
            chunk = max(1, decisions.chunk // vectors)
            if around is None:
                return blocked(count, chunk, decisions.par, body)
            tasks = -(-count // chunk) if decisions.par else 1
            runs = in_runs(spec, reader, count, tasks, begins, lambda _, p: body(p))
            if runs is not None:
                return runs

            def line(p: Expr) -> Stmt:
                return around(begins(p)[0][1], body(p))

            return blocked(count, chunk, decisions.par, line, turns=True)

        def one(index: Index) -> Stmt:
            return store_outputs(spec, reader, outputs, index)

        return Emitted(
            over_parts(spec, reader, joined, decisions.vl, one, lines), inputs, outputs, scratch
        )
    body = over_blocks(shape, decisions.vl, decisions.chunk, decisions.par, block, around, reader)
    return Emitted(body, inputs, outputs, scratch)
