"""Which node of a graph at a large size is which of the same graph at a smaller one.

Two graphs that were written down by the same rules have the same operators, but not node by node: a
builder shares equal nodes and leaves out views that do nothing, and what is equal at one size (two
extents, a slice and the whole of a table) need not be at another. So they are compared from what
they return to what it is made of, and a node may stand for several of the other graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_pruner.graph._padding import NotAlikeError

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Node

__all__ = ["Alike", "Place", "aligned"]

Place = tuple[int, int]
"""A position in the large graph, and that of the same value in the small one."""


@dataclass(frozen=True, slots=True)
class Alike:
    """One operator in both graphs; ``operands`` are the places of what it reads."""

    place: Place
    large: Node
    small: Node
    operands: tuple[Place, ...]


def aligned(large: Graph, small: Graph) -> list[Alike]:
    """All inputs, and what the outputs need, each after its operands.

    Raises ``NotAlikeError`` where other operators are found.
    """
    if len(large.inputs) != len(small.inputs) or len(large.outputs) != len(small.outputs):
        raise NotAlikeError("graphs of other inputs or outputs")
    left = [*zip(large.inputs, small.inputs, strict=True)]
    left += zip(large.outputs, small.outputs, strict=True)
    found: dict[Place, Alike] = {}
    while left:
        if (place := left.pop()) not in found:
            found[place] = both = _alike(large, small, place)
            left += both.operands
    # A node comes after what it reads, in both graphs.
    return [found[place] for place in sorted(found)]


def _alike(large: Graph, small: Graph, place: Place) -> Alike:
    i, j = place
    a, b = large.nodes[i], small.nodes[j]
    if b.op == "slice" and _slices(large, i) < _slices(small, j) and _is_whole(b):
        # The whole of a table at the large size, where nothing is cut off.
        return Alike(place, replace(b, shape=a.shape), b, ((i, b.inputs[0]),))
    if a.op != b.op or len(a.inputs) != len(b.inputs):
        raise NotAlikeError(f"{a.op} beside {b.op}")
    return Alike(place, a, b, tuple(zip(a.inputs, b.inputs, strict=True)))


def _slices(graph: Graph, at: int) -> int:
    """How many slices follow each other there."""
    count = 0
    while graph.nodes[at].op == "slice":
        at, count = graph.nodes[at].inputs[0], count + 1
    return count


def _is_whole(node: Node) -> bool:
    """Whether a slice may take everything at another size."""
    return not any(node.attr("starts")) and all(step == 1 for step in node.attr("steps"))
