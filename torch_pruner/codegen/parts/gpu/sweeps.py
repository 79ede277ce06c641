"""A sweep over an output on a grid of threads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.grid import Grid, in_blocks
from torch_pruner.codegen.tir.builders import UNROLLED, VECTORIZED, Expr, Stmt, loop, when
from torch_pruner.codegen.tir.reader import Index, unlinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.tir.builders import ForKind
    from torch_pruner.graph.ir import Graph


def together(spec: Graph) -> ForKind:
    """How a thread goes through neighbours: in vectors, unless there are booleans in memory.

    TVM takes a vector of booleans for one of 16-bit numbers, in memory, too.
    """
    ends = (*spec.inputs, *spec.outputs)
    flags = any(spec.nodes[i].dtype == "bool" for i in ends)
    return UNROLLED if flags else VECTORIZED


def over_threads(
    spec: Graph, vl: int, threads: int, one: Callable[[Index], Stmt], *, host: bool
) -> Stmt:
    """``one`` for every element of the output; neighbours go to neighbouring threads.

    A thread takes ``vl`` neighbours at once, or one where ``vl`` does not divide their number.
    """
    shape = spec.nodes[spec.outputs[0]].shape
    total = math.prod(shape)
    vl = vl if total % vl == 0 else 1
    groups = total // vl
    grid = Grid(in_blocks(groups, threads), threads, host)

    def block(b: Expr) -> Stmt:
        def each(tid: Expr) -> Stmt:
            group = b * threads + tid
            body = loop(vl, lambda v: one(unlinear(group * vl + v, shape)), together(spec), "v")
            return body if groups % threads == 0 else when(group < groups, body)

        return grid.phases(each)

    return grid.launch(block)
