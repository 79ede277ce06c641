"""Kernels that sweep over memory: elementwise, and one thread per element for short reductions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen._tvm import VECTORIZED, Expr, Stmt, loop, when
from torch_pruner.codegen.gpu.grid import Grid, in_blocks
from torch_pruner.codegen.injective import store_outputs
from torch_pruner.codegen.kernel import Emitted, parameters
from torch_pruner.codegen.reader import Index, Reader, unlinear
from torch_pruner.codegen.reduction import column_block

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit_elementwise(
    spec: Graph, decisions: Mapping[str, int], takes: Signature, *, host: bool = False
) -> Emitted:
    """Decisions: ``vl`` neighbouring elements per thread, ``threads`` per block."""
    inputs, outputs, scratch = parameters(takes)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))

    def one(index: Index) -> Stmt:
        return store_outputs(spec, reader, outputs, index)

    return Emitted(_over(spec, decisions, one, host=host), inputs, outputs, scratch)


def emit_columns(
    spec: Graph, decisions: Mapping[str, int], takes: Signature, *, host: bool = False
) -> Emitted:
    """Windows, and reductions over outer axes. Decisions: ``threads`` per block."""
    inputs, outputs, scratch = parameters(takes)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    block = column_block(spec, reader, outputs)

    def one(index: Index) -> Stmt:
        return block(lambda _: index, 1)

    return Emitted(_over(spec, {**decisions, "vl": 1}, one, host=host), inputs, outputs, scratch)


def _over(
    spec: Graph, decisions: Mapping[str, int], one: Callable[[Index], Stmt], *, host: bool
) -> Stmt:
    """``one`` for every element of the output; neighbours go to neighbouring threads."""
    shape = spec.nodes[spec.outputs[0]].shape
    total, threads = math.prod(shape), decisions["threads"]
    vl = decisions["vl"] if total % decisions["vl"] == 0 else 1
    groups = total // vl
    grid = Grid(in_blocks(groups, threads), threads, host)

    def block(b: Expr) -> Stmt:
        def each(tid: Expr) -> Stmt:
            group = b * threads + tid
            body = loop(vl, lambda v: one(unlinear(group * vl + v, shape)), VECTORIZED, "v")
            return body if groups % threads == 0 else when(group < groups, body)

        return grid.phases(each)

    return grid.launch(block)
