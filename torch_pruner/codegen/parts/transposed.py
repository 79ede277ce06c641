"""A square of vectors turned in registers: lane ``j`` of vector ``i`` becomes ``i`` of ``j``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    imm,
    loop,
    seq,
    stack,
    vector,
)
from torch_pruner.codegen.tir.values import load, store, value_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.tir.reader import Reader


def turns(lanes: int) -> bool:
    """Whether squares of so many lanes can be turned in registers."""
    return lanes > 1 and not lanes & (lanes - 1)


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


class Vectors(Protocol):
    """What squares are turned with."""

    @property
    def vl(self) -> int:
        """Lanes of a vector."""

    @property
    def reader(self) -> Reader:
        """Reads what is turned."""


def in_square(
    nest: Vectors,
    dtype: str,
    taken: Callable[[Expr, Expr], Expr],
    left: Callable[[Expr, Expr], tuple[Buffer, Expr]],
) -> Stmt:
    """A square of vectors, turned: ``taken(i, v)`` is lane ``v`` of vector ``i``, and ``left``
    the place of what the turned square has there."""
    vl = nest.vl
    squares = [buffer(vl * vl, dtype, name, scope="local") for name in ("square", "other")]
    steps, whole = transposed(squares[0], squares[1], vl)

    def vectors(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        return loop(vl, lambda i: loop(vl, lambda v: body(i, v), VECTORIZED, "v"), UNROLLED, "i")

    def take(i: Expr, v: Expr) -> Stmt:
        return nest.reader.scope(
            lambda: [store(squares[0], i * vl + v, taken(i, v).astype(value_dtype(dtype)))]
        )

    def leave(i: Expr, v: Expr) -> Stmt:
        target, at = left(i, v)
        return store(target, at, load(whole, i * vl + v))

    return seq([*(stack(s) for s in squares), vectors(take), *steps, vectors(leave)])
