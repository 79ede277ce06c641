"""Where the first extreme element lies, a candidate for each lane: NaN is the most extreme of all.

Positions have 32 bits while they are looked for, as many as most values; results have 64.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import VECTORIZED, Buffer, Expr, S, Stmt, T, loop, seq
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.codegen.tir.scalar import apply
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.graph.ops import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.tir.reader import Reader
    from torch_pruner.graph.ir import Node


def place_dtype(extent: int) -> str:
    """The dtype of positions along an axis while they are looked for."""
    return "int32" if extent < 2**31 else "int64"


def least_extreme(node: Node, dtype: str) -> Expr:
    """What no element is less extreme than."""
    largest = node.op == "argmax"
    if dtype in FLOATS:
        return T.const(float("-inf" if largest else "inf"), dtype)
    return T.min_value(dtype) if largest else T.max_value(dtype)


def _beats(node: Node, value: Expr, best: Expr, dtype: str) -> Expr:
    wins = apply("gt" if node.op == "argmax" else "lt", (value, best), "bool")
    if dtype not in FLOATS:
        return wins
    nan, known = (apply("isnan", (x,), "bool") for x in (value, best))
    return T.bitwise_or(wins, T.bitwise_and(nan, apply("logical_not", (known,), "bool")))


def keep_extreme(
    reader: Reader,
    node: Node,
    best: Buffer,
    places: Buffer,
    lane: Expr,
    value: Callable[[], Expr],
    position: Expr,
) -> Stmt:
    """``best`` and ``places`` at ``lane`` with one more element, which lies behind those before."""
    dtype = value_dtype(reader.graph.nodes[node.inputs[0]].dtype)
    held, more = T.Var("value", dtype), T.Var("more", "bool")

    def step() -> list[Stmt]:
        return [
            S.Bind(held, value()),
            S.Bind(more, _beats(node, held, best[lane], dtype)),
            store(best, lane, T.Select(more, held, best[lane])),
            store(places, lane, T.Select(more, position.astype(str(places.dtype)), places[lane])),
        ]

    return reader.scope(step)


def first_of_lanes(node: Node, best: Buffer, places: Buffer, lanes: int) -> list[Stmt]:
    """The first extreme element of all lanes, into the first of them."""
    dtype = str(best.dtype)

    def meet(onto: Expr, other: Expr) -> Stmt:
        left, right = best[onto], best[other]
        same = apply("eq", (left, right), "bool")
        if dtype in FLOATS:
            both = (apply("isnan", (x,), "bool") for x in (left, right))
            same = T.bitwise_or(same, T.bitwise_and(*both))
        before = T.bitwise_and(same, places[other] < places[onto])
        wins = T.Var("more", "bool")
        return seq(
            [
                S.Bind(wins, T.bitwise_or(_beats(node, right, left, dtype), before)),
                store(places, onto, T.Select(wins, places[other], places[onto])),
                store(best, onto, T.Select(wins, right, left)),
            ]
        )

    parts: list[Stmt] = []
    while lanes > 1 and lanes % 2 == 0:
        lanes //= 2
        parts.append(loop(lanes, partial(_apart, lanes, meet), VECTORIZED, "v"))
    if lanes > 1:
        parts.append(loop(lanes - 1, lambda v: meet(imm(0), v + 1), name="lane"))
    return parts


def _apart(distance: int, meet: Callable[[Expr, Expr], Stmt], lane: Expr) -> Stmt:
    return meet(lane, lane + distance)
