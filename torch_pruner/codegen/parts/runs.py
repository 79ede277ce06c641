"""Runs of rows for parallel tasks where how many rows count is known at run time.

Kernels of a program that follow one another then divide what counts alike, as kernels for one size
do: a core reads what it wrote itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import counts
from torch_pruner.codegen.tir.builders import PARALLEL, Expr, Stmt, T, index_var, loop, simplified
from torch_pruner.codegen.tir.reader import imm, linear
from torch_pruner.graph.extents import Bound, unspecified

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch_pruner.codegen.tir.reader import Index, Reader
    from torch_pruner.graph.ir import Graph

__all__ = ["in_runs", "leading", "rows_that_count", "run_of"]

_MOST_TASKS = 1 << 15  # their squares are indices


def leading(bounds: Collection[Bound], rows: int, width: int) -> frozenset[Bound]:
    """Of ``bounds`` those that say how many of ``rows`` rows of ``width`` elements count: the first
    so many."""
    return frozenset(
        b for b in bounds if b.stride * b.extent == rows * width and b.stride % width == 0
    )


def rows_that_count(reader: Reader, bounds: Iterable[Bound], rows: int, width: int) -> Expr:
    """How many rows are in front of all of these bounds, each of which is ``leading``."""
    found: Expr = imm(rows)
    for stride, _, number, more in sorted(bounds):
        each = stride // width
        count = counts(reader, number)
        found = T.min((count + more if more else count) * each if each > 1 else count + more, found)
    return found


def run_of(task: Expr, tasks: int, count: Expr) -> tuple[Expr, Expr]:
    """The first row of a task and the first of the next, of ``count`` rows for ``tasks`` tasks.

    Any half of the tasks has half of the rows, but for one.
    """
    if tasks == 1:
        return imm(0), count
    each, more = T.truncdiv(count, imm(tasks)), T.truncmod(count, imm(tasks))

    def begin(at: Expr) -> Expr:
        return at * each + T.truncdiv(at * more, imm(tasks))

    return begin(task), begin(task + 1)


def in_runs(
    spec: Graph,
    reader: Reader,
    extent: int,
    tasks: int,
    begins: Callable[[Expr], Sequence[tuple[int, Index]]],
    body: Callable[[Expr, Expr], Stmt],
) -> Stmt | None:
    """Parallel tasks that do runs of those of ``extent`` rows that anybody needs; ``body`` has the
    task and the row. None where these are not the first so many rows.

    ``begins``: of each output the index at which a row begins.
    """
    if not 1 < tasks <= _MOST_TASKS:
        return None
    said = set()
    row = index_var("row")
    for output, index in begins(row):
        node = spec.nodes[output]
        width, rest = divmod(node.numel, extent)
        first = simplified(linear(index, node.shape) - row * width)
        if rest or not isinstance(first, T.IntImm) or int(first) != 0:
            return None
        own = leading(unspecified(spec, output), extent, width)
        said.add(frozenset(b._replace(stride=b.stride // width) for b in own))
    if len(said) != 1 or not (bounds := said.pop()):
        return None
    count = rows_that_count(reader, bounds, extent, 1)

    def task(p: Expr) -> Stmt:
        first, end = run_of(p, tasks, count)
        return loop(end - first, lambda q: body(p, first + q), name="q")

    return loop(tasks, task, PARALLEL, "p")
