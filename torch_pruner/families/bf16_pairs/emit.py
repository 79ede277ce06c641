"""Emits matmul of bfloat16 by AVX512-BF16: a register tile of float32 sums, two products per step.

``vdpbf16ps`` adds to each of 16 sums the products of one pair of its row and one of its column. The
row's pair is a 32-bit broadcast, the columns' pairs are one vector of the panel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.pair_dots import pair_dot, with_pair_dots
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    stack,
    vector,
)
from torch_pruner.families.bf16_pairs.form import COLUMNS
from torch_pruner.families.bf16_pairs.nest import (
    fetcher,
    fetches,
    pair_nest,
    reduction,
    walk,
)
from torch_pruner.families.bf16_pairs.results import write

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.codegen.tir.reader import Index
    from torch_pruner.families.bf16_pairs.form import Bf16PairsDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: Bf16PairsDecisions[int], signature: Signature) -> Emitted:
    """TIR for a product of matrices."""
    tm, nv, ku = decisions.tm, decisions.nv, decisions.ku
    nest, emitted = pair_nest(spec, "bf16_pairs", signature, tm, nv * COLUMNS, decisions)
    ku = min(ku, nest.form.inner // 2)
    acc = buffer(tm * nest.block, "float32", "acc", scope="local")

    def sums(i: Expr, j: Expr) -> Expr:
        return vector(i * nest.block + j * COLUMNS, COLUMNS)

    def each(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        return loop(tm, lambda i: loop(nv, lambda j: body(i, j), UNROLLED, "j"), UNROLLED, "i")

    def tile(_: Expr, g: Expr, nb: Expr, rb: Expr, turn: tuple[Expr, int]) -> Stmt:
        def columns(first: Expr, j: Expr) -> Expr:
            pair = T.floordiv(first, 2)
            at = nest.panel_at(g, nb, pair) + j * (COLUMNS * nest.width)
            raw = nest.panel[vector(at, COLUMNS * nest.width)]
            return raw if nest.width == 1 else T.reinterpret("int32x16", raw)

        def update(outer: Index, along: Expr, first: Expr) -> Stmt:
            def step(i: Expr, j: Expr) -> Stmt:
                source, at = nest.a_address(g, rb, i, outer)
                both = T.reinterpret("int32", source[vector(at + along, 2)])
                pairs = T.Broadcast(both, COLUMNS), columns(first, j)
                value = pair_dot(acc[sums(i, j)], *pairs)
                return S.BufferStore(acc, value, [sums(i, j)])

            return each(step)

        def written(i: Expr) -> Stmt:
            row = nest.row_index(rb, i)
            return write(nest, g, nb, row, lambda c: (acc, i * nest.block + c), UNROLLED)

        fetch = fetcher(nest, g, nb, turn, fetches(nest, 2, ku))
        zero = T.Broadcast(T.const(0, "float32"), COLUMNS)
        return seq(
            [
                stack(acc),
                each(lambda i, j: S.BufferStore(acc, zero, [sums(i, j)])),
                reduction(nest, 2, ku, fetch, update),
                loop(tm, written, UNROLLED, "i"),
            ]
        )

    emitted.body = with_pair_dots(walk(nest, decisions, 1, tile))
    return emitted
