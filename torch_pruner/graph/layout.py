"""Chooses the order in which dimensions lie in memory for every value that gets a buffer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch_pruner.graph.ir import Graph, Node, Shape

Order = tuple[int, ...]

_MOVES = ("permute", "reshape", "slice", "flip")  # views of which is known how they lie


def identity(rank: int) -> Order:
    return tuple(range(rank))


def channels_last(rank: int) -> Order:
    """Batch, spatial dimensions, channels."""
    return (0, *range(2, rank), 1)


def in_either_order(graph: Graph, fixed: Mapping[int, Order]) -> list[int]:
    """The convolutions whose results lie channels last, unless they are to lie in planes."""
    nodes = enumerate(graph.nodes)
    return [i for i, n in nodes if n.op in ("conv", "conv_transpose") and i not in fixed]


def storage_orders(
    graph: Graph, fixed: Mapping[int, Order], planes: Collection[int] = ()
) -> dict[int, Order]:
    """For each node the memory order of its dimensions, should it be given a buffer.

    ``fixed`` holds orders that callers demand (inputs and outputs). Convolution results lie
    channels last, but for those in ``planes``, and so does what is computed from them elementwise
    or by pooling; a value that is only ever read through one permutation lies in that order
    already.
    """
    users = graph.users()
    orders: dict[int, Order] = {}
    lies: dict[int, Order | None] = {}  # views: where what they are views of lies, if that is known
    last: set[int] = set()  # what lies channels last, and what is made of it
    for i, node in enumerate(graph.nodes):
        rank = len(node.shape)
        orders[i] = identity(rank)
        if i in fixed:
            orders[i] = fixed[i]
        elif node.op in ("slice", "flip"):  # for what is computed from it: it has no buffer itself
            orders[i] = orders[node.inputs[0]]
        elif i in planes:
            orders[i] = identity(rank)
        elif node.op in ("conv", "conv_transpose") or (
            node.kind in (OpKind.POINTWISE, OpKind.WINDOW, OpKind.INJECTIVE)
            and rank >= 3
            and any(_is_channels_last(graph, lies, j, rank) for j in node.inputs)
        ):
            orders[i] = channels_last(rank)
        elif node.op in ("matmul", "matmul_grouped"):
            orders[i] = _wanted_by_reader(graph, users, i) or orders[i]
        else:
            orders[i] = _as_operands(graph, lies, last, node) or orders[i]
        lies[i] = orders[i] if i in fixed else _lies(graph, orders, lies, i)
        if _of_channels_last(graph, orders, last, i):
            last.add(i)
    return orders


def _of_channels_last(
    graph: Graph, orders: Mapping[int, Order], last: Collection[int], i: int
) -> bool:
    """Whether a node lies channels last, or is a view of what does or lies as that."""
    node = graph.nodes[i]
    if node.op in _MOVES:
        return node.inputs[0] in last
    made = node.kind in (OpKind.POINTWISE, OpKind.REDUCE) or node.op == "cat"
    if made and any(j in last for j in node.inputs):
        return True
    return len(node.shape) >= 3 and orders[i] == channels_last(len(node.shape))


def _as_operands(
    graph: Graph, lies: Mapping[int, Order | None], last: Collection[int], node: Node
) -> Order | None:
    """How an operand in ``last`` lies; of a reduction's, the axes that are left."""
    found: Order | None = None
    if node.kind is OpKind.POINTWISE or node.op == "cat":
        operands = (j for j in node.inputs if j in last)
        whole = (j for j in operands if node.op == "cat" or graph.nodes[j].shape == node.shape)
        found = next((lies[j] for j in whole if lies[j] is not None), None)
    elif node.kind is OpKind.REDUCE and node.inputs[0] in last:
        order = lies[node.inputs[0]] or ()
        left = [a for a in range(len(order)) if a not in node.attr("axes")]
        found = tuple(left.index(axis) for axis in order if axis in left)
    real = [axis for axis in found or () if node.shape[axis] > 1]
    return None if real == sorted(real) else found  # it lies so anyway


def _lies(
    graph: Graph, orders: Mapping[int, Order], lies: Mapping[int, Order | None], i: int
) -> Order | None:
    """The order in which the axes of a node lie in memory, of a view those of its operand's."""
    node = graph.nodes[i]
    if node.op not in _MOVES:
        return orders[i]
    source = node.inputs[0]
    order = lies[source]
    if order is None or node.op in ("slice", "flip"):
        return order
    if node.op == "permute":
        perm = list(node.attr("perm"))
        return tuple(perm.index(axis) for axis in order)
    return reshaped_order(graph.nodes[source].shape, order, node.shape)


def reshaped_order(shape: Shape, order: Order, into: Shape) -> Order | None:
    """The order of a reshape's axes in memory, if its operand's axes lie in ``order``.

    None where an axis of the result would lie in several pieces.
    """
    blocks = reshape_blocks(shape, into)
    if blocks is None:
        return None
    found: list[int] = []
    waiting = [axis for axis in order if shape[axis] != 1]
    while waiting:
        sources, made = next(block for block in blocks if waiting[0] in block[0])
        if tuple(waiting[: len(sources)]) != sources:
            return None  # what becomes one axis, or comes apart, lies in several pieces
        found += made
        del waiting[: len(sources)]
    ones = [axis for axis, extent in enumerate(into) if extent == 1]
    for axis in ones:  # they lie anywhere: where they are
        found.insert(min(axis, len(found)), axis)
    return tuple(found)


def reshape_blocks(
    shape: Shape, into: Shape
) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """The least runs of axes, without those of one element, that have as many elements as runs of
    the result's axes."""
    left = [a for a, n in enumerate(shape) if n != 1]
    right = [a for a, n in enumerate(into) if n != 1]
    blocks = []
    while left and right:
        sources, made = [left.pop(0)], [right.pop(0)]
        while (have := math.prod(shape[a] for a in sources)) != (
            want := math.prod(into[a] for a in made)
        ):
            more, axes = (left, sources) if have < want else (right, made)
            if not more:
                return None
            axes.append(more.pop(0))
        blocks.append((tuple(sources), tuple(made)))
    return None if left or right else blocks


def _is_channels_last(
    graph: Graph, orders: Mapping[int, Order | None], node: int, rank: int
) -> bool:
    shape = graph.nodes[node].shape
    return (
        len(shape) == rank and orders[node] == channels_last(rank) and sum(d > 1 for d in shape) > 1
    )


def _wanted_by_reader(graph: Graph, users: list[list[int]], node: int) -> Order | None:
    """The permutation through which everyone reads the value or its elementwise successor."""
    at = node
    while len(users[at]) == 1:
        reader = graph.nodes[users[at][0]]
        if reader.op == "permute":
            return tuple(reader.attr("perm"))
        if reader.kind is not OpKind.POINTWISE or reader.shape != graph.nodes[node].shape:
            return None
        at = users[at][0]
    return None


def innermost_position(shape: Shape, position: Sequence[int]) -> int | None:
    """Which of ``position``, one for each axis, the last axis of more than one element has; None:
    it has none, or there is no such axis."""
    real = [position[k] for k, d in enumerate(shape) if d > 1]
    return real[-1] if real and real[-1] >= 0 else None


def position_below(node: Node, source: Shape, position: Sequence[int]) -> list[int]:
    """Of every axis of a permutation's or a reshape's operand, of shape ``source``, which of
    ``position``, those of the node's axes, its neighbours are along; -1: none."""
    if node.op == "reshape":
        return _before_reshape(source, node.shape, position)
    moved = [-1] * len(source)
    for k, p in enumerate(node.attr("perm")):
        moved[p] = position[k]
    return moved


def _before_reshape(source: Shape, target: Shape, position: Sequence[int]) -> list[int]:
    """Of every axis of ``source`` where its neighbours are in ``target``: as axes go by, those of
    one size together lie along the last of them that is longer than one."""
    found = [-1] * len(source)
    if 0 in source:
        return found
    i = j = 0
    while i < len(source) and j < len(target):
        first, start = i, j
        sizes = [source[i], target[j]]
        i, j = i + 1, j + 1
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                sizes[0] *= source[i]
                i += 1
            else:
                sizes[1] *= target[j]
                j += 1
        longer = [t for t in range(start, j) if target[t] > 1]
        for axis in range(first, i):
            found[axis] = position[longer[-1]] if longer else -1
    return found
