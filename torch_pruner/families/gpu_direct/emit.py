"""Products with little to share: one thread per output element, both operands read where they lie.

Depthwise convolutions, where a tile of columns has no common operand, and products too small to
fill a block of tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.grid import Grid, in_blocks
from torch_pruner.codegen.parts.gpu.operands import first_operand, write_out
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import Nest, second_operand
from torch_pruner.codegen.parts.output import output_path
from torch_pruner.codegen.tir.builders import S, Stmt, T, buffer, loop, seq, stack, when
from torch_pruner.codegen.tir.reader import Reader, imm, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.graph.contraction import contraction_of

if TYPE_CHECKING:
    from torch_pruner.codegen.tir.builders import Expr
    from torch_pruner.codegen.tir.reader import Index
    from torch_pruner.families.gpu_direct.form import GpuDirectDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(
    spec: Graph,
    decisions: GpuDirectDecisions[int],
    signature: Signature,
    *,
    host: bool = False,
) -> Emitted:
    """TIR for a product; neighbouring threads compute neighbouring columns."""
    con = contraction_of(spec)
    inputs, (out,), scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    nest = Nest(spec, con, reader, 1, 1, 1, 1, False, False, None, None, None, out)
    path, threads = output_path(spec, con.anchor), decisions.threads
    total = con.groups * con.rows * con.n
    grid = Grid(in_blocks(total, threads), threads, host)

    def element(at: Expr) -> Stmt:
        g, m, n = unlinear(at, (con.groups, con.rows, con.n))
        acc = buffer(1, con.acc_dtype, "acc", scope="local")
        inside, left = first_operand(nest, g, unlinear(m, con.m), n)

        def step(k: Index) -> Stmt:
            product = left(k).astype(con.acc_dtype) * second_operand(nest, g, k, n).astype(
                con.acc_dtype
            )
            add = store(acc, imm(0), acc[imm(0)] + product)
            guards = inside(k)
            return when(T.all(*guards), add) if guards else add

        def over(done: Index, rest: tuple[int, ...]) -> Stmt:
            if not rest:
                return step(done)
            return loop(rest[0], lambda r: over((*done, r), rest[1:]), name="k")

        clear = store(acc, imm(0), T.const(0, con.acc_dtype))
        return seq(
            [stack(acc), clear, over((), con.k), write_out(nest, path, (g, m, n), acc, imm(0))]
        )

    def block(b: Expr) -> Stmt:
        def each(tid: Expr) -> Stmt:
            at = b * threads + tid
            body = element(at)
            return body if total % threads == 0 else S.IfThenElse(at < total, body, None)

        return grid.phases(each)

    return Emitted(grid.launch(block), inputs, [out], scratch)
