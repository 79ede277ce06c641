"""Values that an elementwise kernel reads across: their neighbours are next to each other in memory
along another axis than its results' last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.graph.ops import ITEMSIZE, OpKind
from torch_pruner.graph.strided import Step, steps

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Shape
    from torch_pruner.graph.strided import Array

_WORDS = frozenset(("float32", "float64", "bfloat16", "int32", "int64"))
_MOVED = frozenset((OpKind.LEAF, OpKind.POINTWISE, OpKind.VIEW))


@dataclass(frozen=True, slots=True)
class Crossing:
    """``nodes`` have their neighbours along axes ``down`` of the results (from, to), whose
    neighbours are those along the axes from ``along`` on. Axes are taken together."""

    nodes: tuple[int, ...]
    down: tuple[int, int]
    along: int


def crossing(graph: Graph, lanes: int) -> Crossing | None:
    """What is read across in squares of ``lanes`` by ``lanes``, or None: nothing is.

    The outputs of ``graph`` have one shape. Of several axes the one wins along which most bytes
    are neighbours.
    """
    shape = graph.nodes[graph.outputs[0]].shape
    if len(shape) < 2 or 0 in shape or lanes < 2 or lanes & (lanes - 1):
        return None
    along = _line(shape, lanes)
    if math.prod(shape[along:]) < lanes:
        return None
    found: dict[tuple[int, int], list[int]] = {}
    for at in _edges(graph, shape):
        if graph.nodes[at].dtype not in _WORDS or not _only_moved(graph, at):
            continue
        if Step.APART not in _steps(graph, at, (along, len(shape)), lanes):
            continue
        for down in _columns(shape[:along], lanes):
            kinds = _steps(graph, at, down, lanes)
            if Step.NEXT in kinds and Step.APART not in kinds:
                found.setdefault(down, []).append(at)
    if not found:
        return None
    down = max(found, key=lambda d: sum(ITEMSIZE[graph.nodes[at].dtype] for at in found[d]))
    return Crossing(tuple(sorted(found[down])), down, along)


def _columns(shape: Shape, lanes: int) -> list[tuple[int, int]]:
    """Axes, up to each, as few as hold a vector."""
    found = []
    for stop in range(1, len(shape) + 1):
        start = stop - 1
        while start > 0 and math.prod(shape[start:stop]) < lanes:
            start -= 1
        if math.prod(shape[start:stop]) >= lanes:
            found.append((start, stop))
    return found


def _line(shape: Shape, lanes: int) -> int:
    """The first of the last axes that together hold a vector, but for the first axis of all."""
    along = len(shape) - 1
    while along > 1 and math.prod(shape[along:]) < lanes:
        along -= 1
    return along


def _edges(graph: Graph, shape: Shape) -> list[int]:
    """Views of the whole shape that the outputs are made of, elementwise from there on."""
    seen, todo = set(graph.outputs), list(graph.outputs)
    found = []
    while todo:
        at = todo.pop()
        node = graph.nodes[at]
        if node.kind is OpKind.VIEW:
            found.append(at)
        elif node.kind is OpKind.POINTWISE:
            below = [i for i in node.inputs if i not in seen and graph.nodes[i].shape == shape]
            seen.update(below)
            todo += below
    return found


def _only_moved(graph: Graph, at: int) -> bool:
    todo = {at}
    while todo:
        node = graph.nodes[todo.pop()]
        if node.kind not in _MOVED:
            return False
        todo.update(node.inputs)
    return True


def _steps(graph: Graph, at: int, axes: tuple[int, int], lanes: int) -> set[Step]:
    """How ``lanes`` elements in the middle of a node lie in inputs, neighbours along ``axes``."""
    shape, (start, stop) = graph.nodes[at].shape, axes
    index: list[Array] = [np.full(lanes, d // 2) for d in shape]
    inner = shape[start:stop]
    total = math.prod(inner)
    first = min(total // 2, total - lanes)
    index[start:stop] = np.unravel_index(first + np.arange(lanes), inner)
    return set(steps(graph, at, index).values())
