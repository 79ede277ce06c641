"""Attention row by row as loops for any processor: what stands in for Triton without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.tir.builders import (
    Expr,
    S,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    stack,
)
from torch_pruner.codegen.tir.reader import Reader, imm, unlinear
from torch_pruner.codegen.tir.values import value_dtype
from torch_pruner.families.gpu_attention.softmax import ZERO, Softmax
from torch_pruner.graph.attention import attention_of

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

F32 = "float32"


def emit(spec: Graph, signature: Signature) -> Emitted:
    """TIR for attention; keys are never shared."""
    att = attention_of(spec)
    assert att is not None
    inputs, (out,), scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    softmax, nodes = Softmax(spec, att, reader), spec.nodes
    scores = buffer(att.keys, F32, "scores", scope="local")
    kept = buffer(3, F32, "kept", scope="local")  # the largest score, the powers' sum, a product
    top, total, found = (kept[imm(k)] for k in range(3))
    queries, keys = nodes[att.scores].inputs
    values = nodes[att.out].inputs[1]
    dtype = value_dtype(nodes[att.scores].dtype)

    def put(at: int, value: Expr) -> Stmt:
        return S.BufferStore(kept, value.astype(F32), [imm(at)])

    def score(head: Expr, query: Expr, key: Expr) -> Stmt:
        def add(d: Expr) -> Stmt:
            one = reader.at(queries, (*unlinear(head, nodes[queries].shape[:-2]), query, d))
            other = reader.at(keys, (*unlinear(head, nodes[keys].shape[:-2]), d, key))
            return put(2, found + one.astype(F32) * other.astype(F32))

        def masked() -> list[Stmt]:
            reader.overrides[att.scores] = lambda _: found.astype(dtype)
            value = reader.at(att.masked, (*unlinear(head, att.batch), query, key))
            stored = S.BufferStore(scores, value.astype(F32), [key])
            return [stored, put(0, softmax.larger(top, scores[key]))]

        sums = loop(att.depth, add, name="d")
        stmt = reader.scope(masked)
        del reader.overrides[att.scores]
        return seq([put(2, ZERO), sums, stmt])

    def power(head: Expr, query: Expr, key: Expr) -> Stmt:
        def emitted() -> list[Stmt]:
            index = (*unlinear(head, att.batch), query, key)
            value = softmax.power(scores[key], top, index)
            return [S.BufferStore(scores, value, [key]), put(1, total + scores[key])]

        return reader.scope(emitted)

    def result(head: Expr, query: Expr, column: Expr) -> Stmt:
        def add(key: Expr) -> Stmt:
            value = reader.at(values, (*unlinear(head, nodes[values].shape[:-2]), key, column))
            return put(2, found + scores[key] * value.astype(F32))

        divisor = softmax.divisor(total, (*unlinear(head, att.batch), query, imm(0)))
        written = softmax.written(out, (head, query, column), found / divisor)
        return seq([put(2, ZERO), loop(att.keys, add, name="key"), written])

    def row(number: Expr) -> Stmt:
        head, query = T.floordiv(number, att.queries), T.floormod(number, att.queries)
        begin = [put(0, softmax.lowest), put(1, ZERO)]
        steps = [
            loop(att.keys, lambda key: score(head, query, key), name="key"),
            loop(att.keys, lambda key: power(head, query, key), name="key"),
            loop(att.width, lambda column: result(head, query, column), name="column"),
        ]
        return seq([*begin, *steps])

    body = seq([stack(scores), stack(kept), loop(att.groups * att.queries, row, name="row")])
    return Emitted(body, inputs, [out], scratch)
