"""Chooses the order in which dimensions lie in memory for every value that gets a buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.ir import Graph

Order = tuple[int, ...]


def identity(rank: int) -> Order:
    return tuple(range(rank))


def channels_last(rank: int) -> Order:
    """Batch, spatial dimensions, channels."""
    return (0, *range(2, rank), 1)


def storage_orders(graph: Graph, fixed: Mapping[int, Order]) -> dict[int, Order]:
    """For each node the memory order of its dimensions, should it be given a buffer.

    ``fixed`` holds orders that callers demand (inputs and outputs). Convolution results lie
    channels last, and so does what is computed from them elementwise or by pooling; a value that is
    only ever read through one permutation lies in that order already.
    """
    users = graph.users()
    orders: dict[int, Order] = {}
    for i, node in enumerate(graph.nodes):
        rank = len(node.shape)
        orders[i] = identity(rank)
        if i in fixed:
            orders[i] = fixed[i]
        elif node.op in ("slice", "flip"):  # for what is computed from it: it has no buffer itself
            orders[i] = orders[node.inputs[0]]
        elif node.op in ("conv", "conv_transpose") or (
            node.kind in (OpKind.POINTWISE, OpKind.WINDOW, OpKind.INJECTIVE)
            and rank >= 3
            and any(_is_channels_last(graph, orders, j, rank) for j in node.inputs)
        ):
            orders[i] = channels_last(rank)
        elif node.op in ("matmul", "matmul_grouped"):
            orders[i] = _wanted_by_reader(graph, users, i) or orders[i]
    return orders


def _is_channels_last(graph: Graph, orders: Mapping[int, Order], node: int, rank: int) -> bool:
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
