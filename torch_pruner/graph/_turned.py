"""What reductions read across: their operands lie along different axes in memory.

A kernel goes along one axis in vectors; what lies along another one is read element by element, of
lines far apart. Such an operand is turned first, in a kernel that does nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.cuts import TURNED
from torch_pruner.graph.layout import innermost_position, position_below
from torch_pruner.graph.ops import ITEMSIZE, OpKind

if TYPE_CHECKING:
    from torch_pruner.graph._groups import Group, State
    from torch_pruner.graph.layout import Order

# Fewer are read across in the time that one more kernel takes.
_WORTH_TURNING = 1 << 14


def turn_reads(state: State, orders: dict[int, Order]) -> None:
    """Give whole operands of reductions that lie across buffers of their own, in the order of those
    that do not; ``orders`` gets what that is."""
    for group in state.groups:
        _turn(state, group, orders)


def _turn(state: State, group: Group, orders: dict[int, Order]) -> None:
    reductions = [m for m in sorted(group.members) if state.node(m).kind is OpKind.REDUCE]
    if not reductions:
        return
    shape = state.node(state.node(reductions[0]).inputs[0]).shape
    lying: dict[int, int] = {}  # what is read or written: along which axis it lies
    for m in sorted(group.members):
        for j in state.node(m).inputs:
            if j not in group.members and state.node(j).shape == shape:
                axis = _innermost(state, j, orders, group.members)
                if axis is not None:
                    lying[j] = axis
    for o in group.outputs:
        if state.node(o).shape == shape and len(orders[o]) == len(shape):
            axis = innermost_position(tuple(shape[k] for k in orders[o]), orders[o])
            if axis is not None:
                lying[o] = axis
    votes: dict[int, int] = {}
    for i, axis in lying.items():
        node = state.node(i)
        votes[axis] = votes.get(axis, 0) + node.numel * ITEMSIZE[node.dtype]
    if len(votes) < 2:
        return
    along = max(votes, key=lambda axis: votes[axis])
    for i, axis in lying.items():
        node = state.node(i)
        views = node.kind is OpKind.VIEW and i not in state.buffers and i not in group.members
        if axis == along or not views or node.numel < _WORTH_TURNING:
            continue
        if not state.otherwise(TURNED, i):
            orders[i] = (*(k for k in range(len(shape)) if k != along), along)
            state.buffers.add(i)


def _innermost(state: State, node: int, orders: dict[int, Order], members: set[int]) -> int | None:
    """Along which axis of a node what it is a view of, and as large, lies in memory."""
    position = list(range(len(state.node(node).shape)))
    while state.node(node).kind is OpKind.VIEW and node not in state.buffers:
        n = state.node(node)
        below = state.node(n.inputs[0])
        if n.op in ("permute", "reshape"):
            position = position_below(n, below.shape, position)
        elif below.shape != n.shape and n.op == "broadcast":
            return None
        node = n.inputs[0]
    if node in members or len(orders[node]) != len(position):
        return None
    order = orders[node]
    shape = tuple(state.node(node).shape[k] for k in order)
    return innermost_position(shape, [position[k] for k in order])
