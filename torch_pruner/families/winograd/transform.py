"""Transforms of minimal filtering, vector by vector: sums of a tile's elements with factors.

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

    from torch_pruner.families.winograd.matrices import Matrix
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
        part = _Part(vl, dtype, places(shape), d)
        stmts += [stack(part.held), *_pass(vl, matrices[d], d, places(shape), read, part.store)]
        read = part.load
    shape = (*shape[:last], len(matrices[last]))
    return [*stmts, *_pass(vl, matrices[last], last, places(shape), read, write)]


def transformed_by_lines(
    vl: int,
    dtype: str,
    matrices: Sequence[tuple[Matrix, ...]],
    read: Callable[[Shape, Expr], Expr],
    write: Callable[[Shape, Expr, Expr], Stmt],
    fetch: Callable[[Shape], Stmt] | None = None,
) -> list[Stmt]:
    """The same, factor by factor, for tiles that registers do not hold: a line along a dimension
    goes through all factors, its elements fetched just before, before the next one begins."""
    shape = tuple(len(factors[0][0]) for factors in matrices)
    stmts: list[Stmt] = []
    last = len(matrices) - 1
    for d, factors in enumerate(matrices):
        after = (*shape[:d], len(factors[-1]), *shape[d + 1 :])
        part = _Part(vl, dtype, places(after), d)
        stmts += [stack(part.held)] if d < last else []
        for start in places((*shape[:d], 1, *shape[d + 1 :])):
            if d == 0 and fetch is not None:
                stmts += [fetch((i, *start[1:])) for i in range(shape[0])]
            target = part.store if d < last else write
            stmts += _line(vl, dtype, factors, d, start, read, target)
        shape, read = after, part.load
    return stmts


def _line(
    vl: int,
    dtype: str,
    factors: tuple[Matrix, ...],
    d: int,
    start: Shape,
    read: Callable[[Shape, Expr], Expr],
    write: Callable[[Shape, Expr, Expr], Stmt],
) -> list[Stmt]:
    """All factors of dimension ``d`` applied to the line of a tile that begins at ``start``."""
    stmts: list[Stmt] = []
    *before, last = factors
    for k, matrix in enumerate(before):
        made = _along(start, d, matrix)
        part = _Part(vl, dtype, made, k)
        stmts += [stack(part.held), *_pass(vl, matrix, d, made, read, part.store)]
        read = part.load
    return [*stmts, *_pass(vl, last, d, _along(start, d, last), read, write)]


def _along(start: Shape, d: int, matrix: Matrix) -> list[Shape]:
    """The places of a line after a transform by ``matrix``."""
    return [(*start[:d], i, *start[d + 1 :]) for i in range(len(matrix))]


class _Part:
    """Elements of a tile between two transforms, in registers."""

    def __init__(self, vl: int, dtype: str, made: Sequence[Shape], d: int) -> None:
        self.vl = vl
        self.order = {place: k for k, place in enumerate(made)}
        self.held = buffer(len(self.order) * vl, dtype, f"part{d}", scope="local")

    def load(self, place: Shape, v: Expr) -> Expr:
        return self.held[self.order[place] * self.vl + v]

    def store(self, place: Shape, v: Expr, value: Expr) -> Stmt:
        return store(self.held, self.order[place] * self.vl + v, value)


def _pass(
    vl: int,
    matrix: Matrix,
    d: int,
    made: Sequence[Shape],
    read: Callable[[Shape, Expr], Expr],
    write: Callable[[Shape, Expr, Expr], Stmt],
) -> list[Stmt]:
    """The transform of dimension ``d``: the elements ``made`` of the tile after it."""

    def vector(place: Shape) -> Stmt:
        def element(v: Expr) -> Stmt:
            def term(i: int) -> Expr:
                return read((*place[:d], i, *place[d + 1 :]), v)

            return write(place, v, _sum(matrix[place[d]], term))

        return loop(vl, element, VECTORIZED, "v")

    return [vector(place) for place in made]


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
