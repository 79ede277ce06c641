"""A square of vectors turned in registers: lane ``j`` of vector ``i`` becomes ``i`` of ``j``."""

from __future__ import annotations

from torch_pruner.codegen.tir.builders import Buffer, S, Stmt, T, imm, vector


def transposed(square: Buffer, other: Buffer, lanes: int) -> tuple[list[Stmt], Buffer]:
    """Statements that turn the ``lanes`` vectors in ``square``, and which buffer then holds them.

    ``lanes`` is a power of two. Blocks off the diagonal change places, of half of the vectors,
    then of a quarter of them, and so on: two shuffles for a pair of vectors each time.
    """
    stmts: list[Stmt] = []
    width = lanes // 2
    while width:
        upper = [lanes + e - width if e & width else e for e in range(lanes)]
        lower = [lanes + e if e & width else e + width for e in range(lanes)]
        for i in (i for i in range(lanes) if not i & width):
            pair = [square[vector(imm(at * lanes), lanes)] for at in (i, i + width)]
            for at, order in ((i, upper), (i + width, lower)):
                turned = T.Shuffle(pair, [T.const(e, "int32") for e in order])
                stmts.append(S.BufferStore(other, turned, [vector(imm(at * lanes), lanes)]))
        square, other, width = other, square, width // 2
    return stmts, square
