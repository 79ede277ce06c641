"""The same tiles as loops for any processor: what stands in for Triton where there is no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.grid import in_blocks
from torch_pruner.codegen.parts.gpu.operands import first_operand, write_out
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import second_operand
from torch_pruner.codegen.parts.output import output_path
from torch_pruner.codegen.tir.builders import Expr, S, Stmt, T, buffer, loop, seq, stack, when
from torch_pruner.codegen.tir.reader import imm, unlinear
from torch_pruner.codegen.tir.values import load
from torch_pruner.families.gpu_triton_product.emit import nest_of
from torch_pruner.families.gpu_triton_product.form import packed_depth

if TYPE_CHECKING:
    from torch_pruner.families.gpu_triton_product.form import GpuTritonProductDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: GpuTritonProductDecisions[int], signature: Signature) -> Emitted:
    """TIR for a product, tile by tile; each part of a reduction after the other."""
    inputs, (out,), scratch = parameters(signature)
    nest = nest_of(spec, decisions, signature, inputs, out)
    con = nest.con
    bm, bn, bk, split = decisions.bm, decisions.bn, decisions.bk, decisions.split
    turns = in_blocks(con.depth, bk) // split
    path = output_path(spec, con.anchor)
    total = buffer(1, con.acc_dtype, "total", scope="local")
    deep = packed_depth(con.depth, bk)

    def b_value(g: Expr, k: Expr, n: Expr) -> Expr:
        if nest.panel is None:
            return second_operand(nest, g, unlinear(k, con.k), n)
        return load(nest.panel, (g * (nest.blocks * bn) + n) * deep + k)

    def add(g: Expr, m: Expr, n: Expr, k: Expr) -> Stmt:
        inside, value = first_operand(nest, g, unlinear(m, con.m), imm(0))
        index = unlinear(k, con.k)
        product = value(index).astype(con.acc_dtype) * b_value(g, k, n).astype(con.acc_dtype)
        added = S.BufferStore(total, total[imm(0)] + product, [imm(0)])
        guards = [k < con.depth, *inside(index)]
        return when(T.all(*guards), added)

    def element(g: Expr, part: Expr, m: Expr, n: Expr) -> Stmt:
        first = part * turns * bk
        steps = loop(turns * bk, lambda k: add(g, m, n, first + k), name="k")
        clear = S.BufferStore(total, T.const(0, con.acc_dtype), [imm(0)])
        if scratch:
            at = ((part * con.groups + g) * con.rows + m) * con.n + n
            put: Stmt = S.BufferStore(scratch[0], total[imm(0)], [at])
        else:
            put = write_out(nest, path, (g, m, n), total, imm(0))
        return when(T.all(m < con.rows, n < con.n), seq([clear, steps, put]))

    down, across = in_blocks(con.rows, bm), in_blocks(con.n, bn)

    def block(tile: Expr) -> Stmt:
        g, mb, nb, part = unlinear(tile, (con.groups, down, across, split))
        return loop(
            bm, lambda i: loop(bn, lambda j: element(g, part, mb * bm + i, nb * bn + j)), name="row"
        )

    body = [stack(total), loop(con.groups * down * across * split, block, name="tile")]
    if scratch:
        numel = con.groups * con.rows * con.n

        def joined(item: Expr) -> Stmt:
            def more(part: Expr) -> Stmt:
                value = total[imm(0)] + scratch[0][part * numel + item]
                return S.BufferStore(total, value, [imm(0)])

            clear = S.BufferStore(total, T.const(0, con.acc_dtype), [imm(0)])
            place = unlinear(item, (con.groups, con.rows, con.n))
            return seq([clear, loop(split, more), write_out(nest, path, place, total, imm(0))])

        body.append(loop(numel, joined, name="item"))
    return Emitted(seq(body), inputs, [out], scratch)
