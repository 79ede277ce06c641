"""Keys that several blocks share: what each leaves in memory, and the launch that joins it.

One query of each head, as a step of decoding has, is a block for each head: a card has many more
multiprocessors. Each part of the keys has a softmax of its own; sums of powers are then shrunk to
the largest score of all parts ("Flash-Decoding", Dao, Haziza, Massa and Sizov, 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.attention_tile import F32, Parts
from torch_pruner.codegen.parts.gpu.grid import Grid, in_blocks
from torch_pruner.codegen.parts.gpu.product_tile import ADDING
from torch_pruner.codegen.tir.builders import UNROLLED, Buffer, Expr, S, Stmt, T, loop, seq
from torch_pruner.codegen.tir.reader import imm, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.gpu_attention.form import FACTS
from torch_pruner.families.gpu_attention.softmax import ZERO, Softmax, inverse_of

if TYPE_CHECKING:
    from torch_pruner.graph.attention import Attention


def row_at(att: Attention, part: Expr, head: Expr, query: Expr) -> Expr:
    """The number of a query among those of all heads and parts."""
    return (part * att.groups + head) * att.queries + query


def write_facts(parts: Parts, row: Expr, top: Expr, whole: Expr) -> list[Stmt]:
    """The largest score of a row's part, and the sum of its powers."""
    at = row * FACTS
    return [store(parts.facts, at, top), store(parts.facts, at + 1, whole)]


def join(softmax: Softmax, parts: Parts, out: Buffer, *, host: bool) -> Stmt:
    """The second launch: a thread for each element of the result."""
    att = softmax.att
    total = att.groups * att.queries * att.width
    grid = Grid(in_blocks(total, ADDING), ADDING, host)
    top, whole, found = (grid.registers(1, F32, name) for name in ("top", "whole", "joined"))

    def each(block: Expr, tid: Expr) -> Stmt:
        item, at = block * ADDING + tid, top.at(tid, 0)
        head, query, column = unlinear(item, (att.groups, att.queries, att.width))
        index = (*unlinear(head, att.batch), query, imm(0))
        largest = top.buffer[at]

        def facts(part: Expr) -> Expr:
            return row_at(att, part, head, query) * FACTS

        def look(part: Expr) -> Stmt:
            seen = softmax.larger(largest, parts.facts[facts(part)])
            return store(top.buffer, at, seen)

        def add(part: Expr) -> Stmt:
            factor, row = T.Var("factor", F32), row_at(att, part, head, query)
            one = parts.sums[row * att.width + column] * factor
            powers = parts.facts[facts(part) + 1] * factor
            shrunk = softmax.shrunk(parts.facts[facts(part)], largest, index)
            return seq(
                [
                    S.Bind(factor, shrunk),
                    store(whole.buffer, at, whole.buffer[at] + powers),
                    store(found.buffer, at, found.buffer[at] + one),
                ]
            )

        bound, inverse = inverse_of(softmax.divisor(whole.buffer[at], index))
        place = (head, query, column)
        body = seq(
            [
                store(top.buffer, at, softmax.lowest),
                store(whole.buffer, at, ZERO),
                store(found.buffer, at, ZERO),
                loop(parts.split, look, UNROLLED, "part"),
                loop(parts.split, add, UNROLLED, "part"),
                bound,
                softmax.written(out, place, found.buffer[at] * inverse),
            ]
        )
        return S.IfThenElse(item < total, body, None) if total % ADDING else body

    return grid.launch(lambda block: grid.phases(lambda tid: each(block, tid)))
