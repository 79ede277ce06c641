"""In which order of axes a kernel's values lie best, where the graph permutes what it computes.

A convolution is written with channels first, whatever its data is: a graph with channels last has a
permutation before and one after it. Loops in the order of the data need neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.graph.ir import Graph, Shape


def stored_orders(spec: Graph) -> dict[int, Shape]:
    """For convolutions and windows, and what is computed from them alike: axes as they should lie.

    Axis ``k`` of what is stored is axis ``order[k]`` of the node. It is the order after the
    permutation that follows, else that before the permutation of the operand; without either the
    node is left out.
    """
    users = spec.users()
    orders: dict[int, Shape] = {}
    for i, node in enumerate(spec.nodes):
        if node.op not in ("matmul", "matmul_grouped") and node.kind in (
            OpKind.CONTRACT,
            OpKind.WINDOW,
        ):
            alike, order = _followed(spec, users, i)
            order = order or order_before(spec, node.inputs[0])
            if order is not None:
                orders.update(dict.fromkeys(alike, order))
    return orders


def order_before(spec: Graph, node: int) -> Shape | None:
    """The order of axes in which the source of a permutation lies; None for any other node."""
    found = spec.nodes[node]
    if found.op != "permute":
        return None
    perm = found.attr("perm")
    return tuple(perm.index(axis) for axis in range(len(perm)))


def _followed(
    spec: Graph, users: Sequence[Sequence[int]], anchor: int
) -> tuple[list[int], Shape | None]:
    """What is computed element by element from ``anchor``, and the permutation that ends it."""
    alike, order = [anchor], None
    for i in alike:  # grows as it is read
        for user in users[i]:
            node = spec.nodes[user]
            if node.op == "permute":
                order = order or node.attr("perm")
            elif node.kind is OpKind.POINTWISE and node.shape == spec.nodes[anchor].shape:
                alike += [user] if user not in alike else []
    return alike, order
