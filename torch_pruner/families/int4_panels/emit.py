"""Emits products of many rows with weights of four bits.

The contraction's nest, with one difference: a block of a panel becomes float32 in a near cache from
words, scales and offsets, for all tiles of rows that pass by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.copies import copy_first
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import Nest
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    Expr,
    S,
    Stmt,
    buffer,
    loop,
    seq,
    vector,
)
from torch_pruner.codegen.tir.reader import Reader
from torch_pruner.families.contraction.emit import compute
from torch_pruner.families.int4_rows.emit import nibbles_of
from torch_pruner.families.int4_rows.form import TABLE_BYTES, copies, int4_product

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.nibbles import Nibbles
    from torch_pruner.families.contraction.form import ContractionDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: ContractionDecisions[int], signature: Signature) -> Emitted:
    """TIR for a product of many rows."""
    found = int4_product(spec)
    assert found is not None
    con = found.con
    inputs, (out,), scratch = parameters(signature)
    rest = list(scratch)
    sums = rest.pop() if decisions.kb > 1 else None
    nest = Nest(
        spec,
        con,
        Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        decisions.vl,
        decisions.tm,
        decisions.nv,
        decisions.ku,
        bool(decisions.par),
        ahead=False,
        panel=None,
        copied=rest.pop() if copies(spec, con) else None,
        sums=sums,
        out=out,
        kb=decisions.kb,
    )
    way = int(decisions.vl * 4 == TABLE_BYTES and found.bits == 4)
    weights = nibbles_of(nest, found, dict(enumerate(inputs)), way)
    nest.near = buffer(_rows(weights) * weights.per_word * nest.bn, con.acc_dtype, "near")
    copied = copy_first(nest) if nest.copied is not None else None
    products = compute(
        nest, decisions.mc, decisions.order, lambda _, nb, kb: _widen(nest, weights, nb, kb)
    )
    return Emitted(weights.within(seq([copied, products])), inputs, [out], scratch)


def _rows(weights: Nibbles) -> int:
    """Words of a column in a block of the reduction."""
    return -(-weights.nest.block_depth // weights.per_word)


def _widen(nest: Nest, weights: Nibbles, nb: Expr, kb: Expr) -> Stmt:
    """Convert a block of a panel into ``near``."""
    near = nest.near
    assert near is not None

    def row(r: Expr) -> Stmt:
        def number(i: Expr) -> Stmt:
            def store(j: Expr) -> Stmt:
                at = vector((r * weights.per_word + i) * nest.bn + j * nest.vl, nest.vl)
                return S.BufferStore(near, weights.weight(nb, kb * _rows(weights) + r, i, j), [at])

            return loop(nest.nv, store, UNROLLED, "j")

        return loop(weights.per_word, number, UNROLLED, "i")

    return loop(_rows(weights), row, name="k")
