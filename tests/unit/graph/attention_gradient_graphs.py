"""Graphs of attention's gradient, as the importer builds them, for tests of every stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_pruner.graph.ir import Graph, GraphBuilder


@dataclass(frozen=True)
class GradientCase:
    """One gradient. ``mask``: "", add, heads or bool; ``seen``: one more reader of the weights."""

    batch: int = 2
    heads: int = 2
    queries: int = 37
    keys: int = 50
    depth: int = 32
    width: int = 32
    mask: str = ""
    causal: bool = False
    apart: bool = False  # the keys of the gradient of queries are another value
    flat: bool = False  # batch and heads in one axis around the products
    seen: bool = False
    dtype: str = "float32"


def attention_gradient(case: GradientCase) -> Graph:
    b, c = GraphBuilder(), case
    full = (c.batch, c.heads, c.queries, c.keys)

    def split(index: int, length: int, width: int) -> int:
        x = b.input(index, (c.batch, length, c.heads * width), c.dtype)
        return b.permute(b.reshape(x, (c.batch, length, c.heads, width)), (0, 2, 1, 3))

    def turned(x: int) -> int:
        return b.permute(x, (0, 1, 3, 2))

    def product(x: int, y: int) -> int:
        if not c.flat:
            return b.matmul(x, y, "float32")
        three = [b.reshape(t, (c.batch * c.heads, *b.shape(t)[2:])) for t in (x, y)]
        out = b.matmul(*three, "float32")
        return b.reshape(out, (c.batch, c.heads, *b.shape(out)[1:]))

    def row(index: int) -> int:
        x = b.input(index, (c.batch, c.heads, c.queries), "float32")
        return b.broadcast(b.reshape(x, (c.batch, c.heads, c.queries, 1)), full)

    q, k = split(0, c.queries, c.depth), split(1, c.keys, c.depth)
    v, grad = split(2, c.keys, c.width), split(3, c.queries, c.width)
    top, delta = row(4), row(5)
    scale, lowest = b.const(1 / math.sqrt(c.depth), "float32"), b.const(-math.inf, "float32")
    s, following = b.pointwise("mul", product(q, turned(k)), scale), 6
    if c.mask:
        shape = (c.batch, c.heads if c.mask == "heads" else 1, c.queries, c.keys)
        mask = b.input(following, shape, "bool" if c.mask == "bool" else "float32")
        following += 1
        if c.mask == "bool":
            s = b.pointwise("where", b.broadcast(mask, full), s, lowest)
        else:
            s = b.pointwise("add", s, b.broadcast(mask, full))
    if c.causal:
        pairs = [b.append("iota", (), (c.queries, c.keys), "int64", dim=d) for d in (1, 0)]
        visible = b.broadcast(b.pointwise("le", *pairs), full)
        s = b.pointwise("where", visible, s, lowest)
    weights = b.pointwise("exp", b.pointwise("sub", s, top))
    along = product(grad, turned(v))
    into = b.pointwise("mul", weights, b.pointwise("sub", along, delta))
    into = b.pointwise("mul", into, scale)
    other = split(following, c.keys, c.depth) if c.apart else k
    halves = c.dtype != "float32"
    left = [b.cast(x, c.dtype) if halves else x for x in (into, weights)]
    found = [product(left[0], other), product(turned(left[0]), q), product(turned(left[1]), grad)]
    if halves:
        found = [b.cast(x, c.dtype) for x in found]
    if c.seen:
        found.append(weights)
    return b.finish(found)
