"""Transforms of minimal filtering, vector by vector: sums of a tile's elements, halved at most.

In: a tile that is read by place, and the matrix of each dimension (``form``). Out: statements that
write every element of the transformed tile. What is between two dimensions stays in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import VECTORIZED, Expr, Stmt, T, buffer, loop, stack
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.winograd.form import places

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.families.winograd.form import Matrix
    from torch_pruner.graph.ir import Shape


def transformed(
    vl: int,
    dtype: str,
    matrices: Sequence[Matrix],
    read: Callable[[Shape, Expr], Expr],
    write: Callable[[Shape, Expr, Expr], Stmt],
) -> list[Stmt]:
    """``write`` every element of the tile that ``read`` gives, transformed in each dimension."""
    shape = tuple(len(m[0]) for m in matrices)
    stmts: list[Stmt] = []
    *before, last = range(len(matrices))
    for d in before:
        shape = (*shape[:d], len(matrices[d]), *shape[d + 1 :])
        part = _Part(vl, dtype, shape, d)
        stmts += [stack(part.held), *_pass(vl, matrices[d], d, shape, read, part.store)]
        read = part.load
    shape = (*shape[:last], len(matrices[last]))
    return [*stmts, *_pass(vl, matrices[last], last, shape, read, write)]


class _Part:
    """A tile between the transforms of two dimensions, in registers."""

    def __init__(self, vl: int, dtype: str, shape: Shape, d: int) -> None:
        self.vl = vl
        self.order = {place: k for k, place in enumerate(places(shape))}
        self.held = buffer(len(self.order) * vl, dtype, f"part{d}", scope="local")

    def load(self, place: Shape, v: Expr) -> Expr:
        return self.held[self.order[place] * self.vl + v]

    def store(self, place: Shape, v: Expr, value: Expr) -> Stmt:
        return store(self.held, self.order[place] * self.vl + v, value)


def _pass(
    vl: int,
    matrix: Matrix,
    d: int,
    shape: Shape,
    read: Callable[[Shape, Expr], Expr],
    write: Callable[[Shape, Expr, Expr], Stmt],
) -> list[Stmt]:
    """The transform of dimension ``d``; ``shape`` is the tile's after it."""

    def vector(place: Shape) -> Stmt:
        def element(v: Expr) -> Stmt:
            def term(i: int) -> Expr:
                return read((*place[:d], i, *place[d + 1 :]), v)

            return write(place, v, _sum(matrix[place[d]], term))

        return loop(vl, element, VECTORIZED, "v")

    return [vector(place) for place in places(shape)]


def _sum(row: Sequence[float], term: Callable[[int], Expr]) -> Expr:
    """A sum of terms with factors; those of one size are added up before they are scaled."""
    total: Expr | None = None
    for size in sorted({abs(c) for c in row if c}, reverse=True):
        part = _signed([(i, c > 0) for i, c in enumerate(row) if abs(c) == size], term)
        part = part if size == 1 else T.const(size, "float32") * part
        total = part if total is None else total + part
    assert total is not None
    return total


def _signed(terms: Sequence[tuple[int, bool]], term: Callable[[int], Expr]) -> Expr:
    """The sum of terms, each of them positive or not; the positive ones come first."""
    total: Expr | None = None
    for i, positive in sorted(terms, key=lambda of: not of[1]):
        value = term(i)
        if total is None:
            total = value if positive else T.const(-1.0, "float32") * value
        else:
            total = total + value if positive else total - value
    assert total is not None
    return total
