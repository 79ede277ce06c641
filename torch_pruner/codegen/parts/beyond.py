"""Work that is left out where nobody needs it: conditions on what ``graph.extents`` says.

What is left out lies behind a number that is known at run time, at the end of an axis. So work is
dealt to tasks in turns and not in runs, or the last ones would have nothing to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.output import output_path
from torch_pruner.codegen.tir.builders import Expr, Stmt, T, index_dtype, simplified, when
from torch_pruner.codegen.tir.reader import imm, linear
from torch_pruner.graph.extents import axis_counts, unspecified, unwritten

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch_pruner.codegen.tir.reader import Index, Reader
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.extents import Bound
    from torch_pruner.graph.ir import Graph

__all__ = [
    "around_lines",
    "behind",
    "beyond",
    "counts",
    "divided",
    "needed",
    "row_axes",
    "row_counts",
    "some_needed",
    "unless",
]


def counts(reader: Reader, count: int) -> Expr:
    """A number of elements that counts, as an index."""
    return reader.at(count, ()).astype(index_dtype())


def beyond(
    reader: Reader, bounds: Collection[Bound], numel: int, first: Expr, last: Expr | None = None
) -> Expr | None:
    """Whether nobody needs an element of a value of ``numel`` elements; None: some are needed.

    ``first`` is its row-major position; with ``last``, the first of several positions up to that
    one, which increase.
    """
    first = simplified(first)
    tests = []
    for stride, extent, count, more in sorted(bounds):
        period = stride * extent
        place = T.floordiv(first, imm(stride)) if stride > 1 else first
        if period < numel:
            place = T.floormod(place, imm(extent))
        test = place >= counts(reader, count) + more
        if last is not None and period < numel:
            same = T.EQ(T.floordiv(first, imm(period)), T.floordiv(last, imm(period)))
            test = T.all(test, same)
        tests.append(test)
    return T.any(*tests) if tests else None


def unless(condition: Expr | None, body: Stmt) -> Stmt:
    """``body`` where the condition does not hold; None: it never does."""
    return body if condition is None else when(T.Not(condition), body)


def row_counts(spec: Graph, con: Contraction, reader: Reader) -> tuple[Expr | None, ...]:
    """Of images and of positions along each spatial dimension of a convolution's result how many
    are needed, where that is known at run time."""
    known = axis_counts(
        spec.nodes[con.anchor].shape, unwritten(spec, output_path(spec, con.anchor))
    )
    return tuple(needed(reader, known[a]) if a in known else None for a in row_axes(con))


def row_axes(con: Contraction) -> tuple[int, ...]:
    """The axes of a convolution's result along which its rows lie."""
    return (0, *range(2, 1 + len(con.m)))


def needed(reader: Reader, bound: Bound) -> Expr:
    """Of elements along an axis the number in front of a bound."""
    count = counts(reader, bound.number)
    return T.min(count + bound.more, imm(bound.extent)) if bound.more else count


def divided(position: Expr, extents: Sequence[int | Expr]) -> Index:
    """The index of a row-major position among ``extents`` that may be known at run time only."""
    found: list[Expr] = []
    for extent in reversed(extents[1:]):
        found.append(T.truncmod(position, extent))
        position = T.truncdiv(position, extent)
    return (position, *reversed(found))


def behind(body: Stmt, place: Sequence[Expr], counts: Sequence[Expr | None]) -> Stmt:
    """``body``, unless ``place`` lies behind what counts along some axis."""
    tests = [p >= n for p, n in zip(place, counts, strict=True) if n is not None]
    return unless(T.any(*tests) if tests else None, body)


def around_lines(spec: Graph, reader: Reader) -> Callable[[Index, Stmt], Stmt] | None:
    """A condition around what computes lines of the outputs, which have one shape, by where a line
    begins; None: all of some output is needed."""
    if not all(unspecified(spec, o) for o in spec.outputs):
        return None
    return lambda line, body: some_needed(spec, reader, [(o, line) for o in spec.outputs], body)


def some_needed(
    spec: Graph, reader: Reader, places: Sequence[tuple[int, Index]], body: Stmt
) -> Stmt:
    """``body``, which writes outputs of ``spec``, unless it writes nothing that anybody needs.

    ``places``: outputs, and of each the index of the first element that is written; along every
    axis others lie at the same place or behind it.
    """
    tests = []
    for output, index in places:
        shape = spec.nodes[output].shape
        bounds = unspecified(spec, output)
        test = beyond(reader, bounds, spec.nodes[output].numel, linear(index, shape))
        if test is None:
            return body
        tests.append(test)
    return unless(T.all(*tests), body)
