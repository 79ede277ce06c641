"""Graphs of attention, as importers build them, for tests of every stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_pruner.graph.ir import Graph, GraphBuilder


@dataclass(frozen=True)
class Case:
    """One attention. ``mask``: "", add, row, heads, bool; ``guard``: rows that see nothing give 0.

    ``seen``: one more reader of the weights, which keeps them in memory.
    """

    batch: int = 1
    heads: int = 4
    kv: int = 4
    queries: int = 37
    keys: int = 50
    depth: int = 32
    width: int = 32
    mask: str = ""
    causal: bool = False
    guard: bool = False
    dtype: str = "float32"
    flat: bool = False  # batch and heads in one axis around the products, as torch.bmm has them
    seen: bool = False
    static: bool = False  # the mask is a parameter
    row: bool = False  # the logarithm of each row's sum is a result, too, as training keeps it


def attention(case: Case) -> Graph:
    b, c = GraphBuilder(), case
    wide = "float64" if c.dtype == "float64" else "float32"

    def split(index: int, length: int, heads: int, width: int) -> int:
        x = b.input(index, (c.batch, length, heads * width), c.dtype)
        return b.permute(b.reshape(x, (c.batch, length, heads, width)), (0, 2, 1, 3))

    def repeat(x: int) -> int:
        if c.kv == c.heads:
            return x
        batch, heads, length, width = b.shape(x)
        x = b.reshape(x, (batch, heads, 1, length, width))
        x = b.broadcast(x, (batch, heads, c.heads // c.kv, length, width))
        return b.reshape(x, (batch, c.heads, length, width))

    def product(x: int, y: int, dtype: str) -> int:
        if not c.flat:
            return b.matmul(x, y, dtype)
        three = [b.reshape(t, (c.batch * c.heads, *b.shape(t)[2:])) for t in (x, y)]
        out = b.matmul(*three, dtype)
        return b.reshape(out, (c.batch, c.heads, *b.shape(out)[1:]))

    q = split(0, c.queries, c.heads, c.depth)
    k, v = repeat(split(1, c.keys, c.kv, c.depth)), repeat(split(2, c.keys, c.kv, c.width))
    lowest = b.const(-math.inf, wide)
    s = product(q, b.permute(k, (0, 1, 3, 2)), wide)
    s = b.pointwise("mul", s, b.const(1 / math.sqrt(c.depth), wide))
    shapes = {
        "add": (c.batch, 1, c.queries, c.keys), "row": (c.batch, 1, 1, c.keys),
        "heads": (c.batch, c.heads, c.queries, c.keys), "bool": (c.batch, 1, c.queries, c.keys),
    }  # fmt: skip
    if c.mask == "bool":
        s = b.pointwise("where", b.input(3, shapes[c.mask], "bool", static=c.static), s, lowest)
    elif c.mask:
        s = b.pointwise("add", s, b.input(3, shapes[c.mask], wide, static=c.static))
    if c.causal:
        column, row = (
            b.append("iota", (), (c.queries, c.keys), "int64", dim=dim) for dim in (1, 0)
        )
        s = b.pointwise("where", b.pointwise("le", column, row), s, lowest)
    top = b.reduce("max", s, (3,), keepdim=True)
    if c.guard:
        top = b.pointwise("where", b.pointwise("eq", top, lowest), b.const(0.0, wide), top)
    powers = b.pointwise("exp", b.pointwise("sub", s, top))
    total = b.reduce("sum", powers, (3,), keepdim=True)
    if c.guard:
        nothing = b.pointwise("eq", total, b.const(0.0, wide))
        total = b.pointwise("where", nothing, b.const(1.0, wide), total)
    weights = b.pointwise("div", powers, total)
    out = product(b.cast(weights, c.dtype), v, c.dtype)
    results = [out, weights] if c.seen else [out]
    if c.row:
        log = b.pointwise("add", b.pointwise("log", total), top)
        results.append(b.permute(b.reshape(log, (c.batch, c.heads, c.queries)), (0, 2, 1)))
    return b.finish(results)


def narrow(dtype: str, queries: int = 1) -> Graph:
    """Attention of float32 queries with keys and values of another dtype, int8 with scales."""
    b = GraphBuilder()
    q = b.input(0, (1, 4, queries, 32), "float32")
    k, v = (b.input(i, (1, 2, 64, 32), dtype) for i in (1, 2))
    scales = [b.input(i, (1, 2, 64, 1), "float32") for i in (3, 4)] if dtype == "int8" else []

    def repeated(x: int, scale: int | None) -> int:
        wide = b.cast(x, "float32")
        if scale is not None:
            wide = b.pointwise("mul", wide, b.broadcast(scale, b.shape(wide)))
        wide = b.broadcast(b.reshape(wide, (1, 2, 1, 64, 32)), (1, 2, 2, 64, 32))
        return b.reshape(wide, (1, 4, 64, 32))

    k, v = (repeated(x, scale) for x, scale in zip((k, v), scales or (None, None), strict=True))
    s = b.matmul(q, b.permute(k, (0, 1, 3, 2)))
    s = b.pointwise("mul", s, b.const(1 / math.sqrt(32), "float32"))
    top = b.broadcast(b.reduce("max", s, (3,), keepdim=True), b.shape(s))
    powers = b.pointwise("exp", b.pointwise("sub", s, top))
    total = b.broadcast(b.reduce("sum", powers, (3,), keepdim=True), b.shape(s))
    return b.finish([b.matmul(b.pointwise("div", powers, total), v)])
