"""Values that threads of one warp hand to each other."""

from __future__ import annotations

from torch_pruner.codegen.tir.builders import Expr, S, Stmt, T

ALL_LANES = 0xFFFFFFFF
DISTANCES = (16, 8, 4, 2, 1)  # of exchanges after which each thread of a warp has what all had


def exchanged(value: Expr, dtype: str, distance: int) -> tuple[list[Stmt], Expr, Expr]:
    """What comes first, the thread's own value, and that of the thread ``distance`` from it.

    All threads of a warp have to get there. ``distance`` is a power of two below their number: of
    each pair, either gets the other's. ``dtype``: a number of four or eight bytes.
    """
    own, other = T.Var("own", dtype), T.Var("other", dtype)
    everyone = T.const(ALL_LANES, "uint32")
    shuffled = T.call_extern(dtype, "__shfl_xor_sync", everyone, own, distance)
    return [S.Bind(own, value), S.Bind(other, shuffled)], own, other
