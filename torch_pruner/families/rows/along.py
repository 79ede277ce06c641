"""Loops along a row: groups of vectors, single vectors, and the elements that are left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import UNROLLED, VECTORIZED, Expr, Stmt, loop, seq
from torch_pruner.codegen.tir.reader import Index, imm

if TYPE_CHECKING:
    from collections.abc import Callable


def sweep(
    prefix: Index, extent: int, vl: int, width: int, element: Callable[[Index, Expr], Stmt]
) -> Stmt:
    """The innermost axis: groups of ``width`` vectors, single vectors, single elements."""
    group = vl * width
    parts = []
    if extent // group:

        def step(o: Expr) -> Stmt:
            def vector(u: Expr) -> Stmt:
                def lane(v: Expr) -> Stmt:
                    return element((*prefix, o * group + u * vl + v), u * vl + v)

                return loop(vl, lane, VECTORIZED, "v")

            return loop(width, vector, UNROLLED, "u")

        parts.append(loop(extent // group, step, name="k"))
    done = extent - extent % group
    vectors = (extent - done) // vl
    if vectors:

        def single(o: Expr) -> Stmt:
            return loop(vl, lambda v: element((*prefix, done + o * vl + v), v), VECTORIZED, "v")

        parts.append(loop(vectors, single, name="k"))
    rest = (extent - done) % vl
    if rest:
        first = extent - rest
        parts.append(loop(rest, lambda e: element((*prefix, first + e), imm(0)), name="e"))
    return seq(parts)


def sweep_apart(
    extents: tuple[int, ...],
    parted: int,
    vl: int,
    width: int,
    element: Callable[[Index, Expr], Stmt],
) -> Stmt:
    """Whole rows, ``width`` parts of the axis ``parted`` side by side, a vector of each.

    A core follows several streams of memory at once, and one of them stops at every page.
    """
    *outer, last = extents
    parts = [e // width if a == parted else e for a, e in enumerate(extents)]

    def at(index: Index, u: Expr) -> Index:
        return tuple(i + u * parts[a] if a == parted else i for a, i in enumerate(index))

    def nested(prefix: Index) -> Stmt:
        if len(prefix) < len(outer):
            return loop(parts[len(prefix)], lambda r: nested((*prefix, r)), name="r")
        vectors = parts[-1] // vl

        def step(o: Expr) -> Stmt:
            def vector(u: Expr) -> Stmt:
                def lane(v: Expr) -> Stmt:
                    return element(at((*prefix, o * vl + v), u), u * vl + v)

                return loop(vl, lane, VECTORIZED, "v")

            return loop(width, vector, UNROLLED, "u")

        done = vectors * vl
        found = [loop(vectors, step, name="k")] if vectors else []
        if last > done and parted < len(outer):

            def rest(e: Expr) -> Stmt:
                def one(u: Expr) -> Stmt:
                    return element(at((*prefix, done + e), u), imm(0))

                return loop(width, one, name="u")

            found.append(loop(last - done, rest, name="e"))
        return seq(found)

    return nested(())
