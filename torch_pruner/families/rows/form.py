"""Row kernels: decisions, and a row of scratch for what is kept between passes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.graph.layout import reshape_blocks
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.rows import row_domain
from torch_pruner.graph.signature import BufferSpec
from torch_pruner.graph.strided import strided

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Shape

N = TypeVar("N")


class RowsDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    lanes: N  # vectors that accumulate side by side
    chunk: N  # rows of a parallel task
    par: N  # 1: tasks in parallel
    apart: N  # 1: these vectors are of so many parts of a row


def parted_axis(spec: Graph, lanes: int, vl: int) -> int | None:
    """Which of a row's axes, by its place among them, is divided into ``lanes`` parts that vectors
    read side by side: the outermost that can be. None: none can."""
    domain = row_domain(spec)
    *outer, last = (domain.shape[a] for a in domain.axes)
    for place, extent in enumerate(outer):
        if extent % lanes == 0:
            return place
    return len(outer) if last % (lanes * vl) == 0 else None


def joined_axes(spec: Graph, lanes: int) -> int:
    """How many of a row's last axes are swept as one, for they are short and lie so everywhere."""
    domain = row_domain(spec)
    axes, shape = domain.axes, domain.shape
    count, width = 1, shape[axes[-1]]
    while width < 2 * lanes and count < len(axes):
        inner, outer = axes[-count], axes[-count - 1]
        if outer + 1 != inner or not _one_line(spec, shape, outer):
            break
        count, width = count + 1, width * shape[outer]
    return count


def _one_line(spec: Graph, shape: Shape, outer: int) -> bool:
    """Whether every value of ``shape`` has its axes ``outer`` and the next in one piece."""
    inner = outer + 1
    for i, node in enumerate(spec.nodes):
        if node.shape != shape or not (node.op == "input" or node.kind is OpKind.VIEW):
            continue
        place = strided(spec, i)
        if place is not None:
            if place.strides[outer] != place.strides[inner] * shape[inner]:
                return False
        elif node.op != "broadcast" or not _repeats(spec, i, (outer, inner)):
            return False
    return True


def _repeats(spec: Graph, broadcast: int, axes: tuple[int, ...]) -> bool:
    """Whether a broadcast repeats one element along ``axes``, as what was made of a row is."""
    node = spec.nodes[broadcast]
    source = spec.nodes[node.inputs[0]].shape
    ahead = len(node.shape) - len(source)
    return all(a < ahead or source[a - ahead] == 1 for a in axes)


def swept_line(spec: Graph, lanes: int) -> int:
    """How many elements of a row vectors follow each other along."""
    domain = row_domain(spec)
    joined = joined_axes(spec, lanes)
    if joined > 1:
        return math.prod(domain.shape[a] for a in domain.axes[-joined:])
    return whole_run(spec, lanes)


def whole_run(spec: Graph, least: int) -> int:
    """How many neighbours along the last axis of rows lie in one piece of every value: fewer than
    the axis has where a view made it of axes that lie apart. At least ``least``."""
    domain = row_domain(spec)
    axis = domain.axes[-1]
    run = domain.shape[axis]
    for i, node in enumerate(spec.nodes):
        if node.op != "reshape" or node.shape != domain.shape or strided(spec, i) is not None:
            continue
        source = spec.nodes[node.inputs[0]].shape
        place = strided(spec, node.inputs[0])
        for sources, made in reshape_blocks(source, node.shape) or ():
            inner = source[sources[-1]]
            for outer, near in zip(sources[-2::-1], sources[:0:-1], strict=True):
                if place is None or place.strides[outer] != place.strides[near] * source[near]:
                    break
                inner *= source[outer]
            if made == (axis,) and inner < run and run % inner == 0 and inner >= least:
                run = inner
    return run


def row_tasks(spec: Graph, decisions: RowsDecisions[int]) -> tuple[int, int]:
    """(rows of one parallel task, number of tasks) of a row kernel."""
    rows = row_domain(spec).rows
    chunk = max(1, min(decisions.chunk, rows)) if decisions.par else rows
    return chunk, -(-rows // chunk)


def scratch(spec: Graph, decisions: RowsDecisions[int]) -> tuple[BufferSpec, ...]:
    """One row of scratch per parallel task for every value kept between passes."""
    domain = row_domain(spec)
    tasks = row_tasks(spec, decisions)[1]
    return tuple(BufferSpec((tasks, domain.width), spec.nodes[k].dtype) for k in domain.kept_values)
