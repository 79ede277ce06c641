"""Groups of nodes that become one kernel, while a graph is being cut: what ``fuse`` works on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.graph.cuts import NO_CUTS, Site
from torch_pruner.graph.ops import FLOATS, ITEMSIZE, OpKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.attention_gradient import AttentionGradient
    from torch_pruner.graph.cuts import Cuts
    from torch_pruner.graph.ir import Graph, Node
    from torch_pruner.graph.layout import Order

_LOCATED = {"window_max", "window_argmax"}
_COLUMNS = 256  # fewer leave threads without any
PROLOGUE = 24  # operators before a reduction: more are computed once, into a buffer


@dataclass(slots=True)
class Group:
    members: set[int]
    outputs: tuple[int, ...]


@dataclass(slots=True)
class State:
    graph: Graph
    users: list[list[int]]
    ancestors: list[int]  # bit sets
    group_of: dict[int, Group] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    buffers: set[int] = field(default_factory=set)
    cuts: Cuts = NO_CUTS
    sites: list[Site] = field(default_factory=list)

    def otherwise(self, kind: str, node: int) -> bool:
        """Whether what rules say of a node is not done. From now on it is known as a site."""
        site = Site(kind, node)
        self.sites.append(site)
        return site in self.cuts

    def node(self, i: int) -> Node:
        return self.graph.nodes[i]


def ancestors(graph: Graph) -> list[int]:
    sets: list[int] = []
    for node in graph.nodes:
        mask = 0
        for j in node.inputs:
            mask |= sets[j] | (1 << j)
        sets.append(mask)
    return sets


def with_epilogue(state: State, anchor: int, *, views: bool) -> Group:
    """The anchor and the elementwise operators after it, while one value carries everything."""
    graph, outputs = state.graph, set(state.graph.outputs)
    path: dict[int, tuple[object, ...]] = {anchor: ()}  # the views from the anchor to a node
    order = [anchor]
    bit = 1 << anchor
    numel = graph.nodes[anchor].numel
    for i in range(anchor + 1, len(graph.nodes)):
        node = graph.nodes[i]
        if not state.ancestors[i] & bit or i in state.group_of or node.numel != numel:
            continue
        fits = node.kind is OpKind.POINTWISE or (views and node.op in ("reshape", "permute"))
        if not fits or any(j not in path and state.ancestors[j] & bit for j in node.inputs):
            continue
        paths = {path[j] for j in node.inputs if j in path}
        if len(paths) == 1:  # two would need two elements of the anchor at once, as x + x.t() does
            view = ((node.op, node.shape, node.attrs),) if node.kind is OpKind.VIEW else ()
            path[i] = (*paths.pop(), *view)
            order.append(i)
    for end in reversed(order):
        # A view that leaves the graph has a buffer of its own; others belong to their readers.
        read = graph.nodes[end].kind is OpKind.VIEW or widens(state, end)
        if end != anchor and read and end not in outputs:
            continue
        inside = {m for m in order if m == end or state.ancestors[end] >> m & 1}
        if all(
            m == end or (m not in outputs and all(u in inside for u in state.users[m]))
            for m in inside
        ):
            return Group(inside, (end,))
    return Group({anchor}, (anchor,))


def gradient_group(state: State, found: AttentionGradient) -> Group:
    """The gradient of attention, and what each result is rounded to."""
    paths = [_rounded(state, o) for o in found.outputs]
    return Group({*found.inner, *(i for p in paths for i in p)}, tuple(p[-1] for p in paths))


def _rounded(state: State, product: int) -> list[int]:
    """``product``, and up to a cast of it what alone reads it."""
    path = [product]
    while len(users := state.users[path[-1]]) == 1 and path[-1] not in state.graph.outputs:
        path.append(users[0])
        node = state.node(users[0])
        if node.op == "cast":
            return path
        if node.op not in ("reshape", "permute"):
            break
    return [product]


def windows_group(state: State, first: int, orders: Mapping[int, Order]) -> Group:
    """A window and what follows it; with a maximum its position, for which elements are compared
    in the same way, if both lie in one order of axes."""
    group, node = with_epilogue(state, first, views=False), state.node(first)
    for i in state.users[node.inputs[0]]:
        other = state.node(i)
        alike = (other.inputs, other.shape, other.attrs) == (node.inputs, node.shape, node.attrs)
        if i == first or i in state.group_of or {node.op, other.op} != _LOCATED or not alike:
            continue
        more = with_epilogue(state, i, views=False)
        outputs = (*group.outputs, *more.outputs)
        together = _acyclic(state, group.members | more.members)
        if together and len({orders[o] for o in outputs}) == 1:
            return Group(group.members | more.members, outputs)
    return group


def rows_group(state: State, first: int) -> Group:
    """Reductions over the same axes of one domain and the elementwise operators around them."""
    graph = state.graph
    source = graph.nodes[first].inputs[0]
    shape, axes = graph.nodes[source].shape, graph.nodes[first].attr("axes")
    members = _with_prologue(state, first, {first})
    if graph.nodes[first].op.startswith("arg"):
        return _closed(state, {first})
    per_row = tuple(d for k, d in enumerate(shape) if k not in axes and d != 1)
    views: set[int] = set()
    for i in range(first + 1, len(graph.nodes)):
        node = graph.nodes[i]
        if i in state.group_of or i in members:
            continue
        if _same_rows(graph, node, shape, axes) and node.inputs[0] not in members:
            both = _with_prologue(state, i, members | {i})
            shared = _full_reads(state, members, shape) & _full_reads(state, both - members, shape)
            if shared and _acyclic(state, both, views):
                members = both
            continue
        if not any(j in members or j in views for j in node.inputs):
            continue
        if _joins_rows(graph, node, members | views, shape, axes, per_row):
            if node.kind is OpKind.VIEW:
                views.add(i)
            elif _acyclic(state, members | {i}, views):
                members.add(i)
    return _closed(state, members)


def _with_prologue(state: State, reduction: int, members: set[int]) -> set[int]:
    """``members`` and the elementwise producers of whole rows, unless another kernel has them."""
    members = set(members)
    source = state.node(reduction).inputs[0]
    shape, stack = state.node(source).shape, [source]
    while stack:
        i = stack.pop()
        node = state.node(i)
        if (
            i in members
            or i in state.group_of
            or node.kind is not OpKind.POINTWISE
            or node.shape != shape
        ):
            continue
        if _inlined(state, i) > PROLOGUE:  # each pass over the rows would compute it again
            state.buffers.add(i)
        elif _acyclic(state, members | {i}):
            members.add(i)
            stack.extend(node.inputs)
    return members


def _same_rows(graph: Graph, node: Node, shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether ``node`` reduces the same rows, to values."""
    if node.kind is not OpKind.REDUCE or node.op.startswith("arg"):
        return False
    return graph.nodes[node.inputs[0]].shape == shape and node.attr("axes") == axes


def _full_reads(state: State, members: set[int], shape: tuple[int, ...]) -> set[int]:
    """Whole values that ``members`` read from outside, views looked through."""
    found: set[int] = set()
    stack = [j for m in members for j in state.node(m).inputs if j not in members]
    while stack:
        i = stack.pop()
        node = state.node(i)
        if node.kind is OpKind.VIEW and node.op in ("permute", "reshape"):
            stack.extend(node.inputs)
        elif node.numel == math.prod(shape):
            found.add(i)
    return found


def _inlined(state: State, node: int) -> int:
    """How many operators a reader of ``node`` computes for each element, up to ``PROLOGUE`` + 1."""
    found: set[int] = set()
    stack = [node]
    while stack and len(found) <= PROLOGUE:
        i = stack.pop()
        n = state.node(i)
        if i in found or i in state.group_of or n.kind is OpKind.LEAF or n.op == "input":
            continue
        if i != node and i in state.buffers:
            continue
        if n.kind is not OpKind.VIEW:
            found.add(i)
        stack.extend(n.inputs)
    return len(found)


def _joins_rows(
    graph: Graph,
    node: Node,
    inside: set[int],
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    per_row: tuple[int, ...],
) -> bool:
    squeezed = tuple(d for d in node.shape if d != 1)
    if node.kind is OpKind.REDUCE:
        return _same_rows(graph, node, shape, axes) and node.inputs[0] in inside
    if node.op == "reshape":  # keepdim: only ones come and go
        return squeezed == per_row == tuple(d for d in graph.nodes[node.inputs[0]].shape if d != 1)
    if node.op == "broadcast":
        operand = graph.nodes[node.inputs[0]].shape
        if _first_axes(shape, axes):  # which a broadcast does not name
            operand = (1,) * (len(shape) - len(operand)) + operand
        kept = tuple(1 if k in axes else d for k, d in enumerate(shape))
        return node.shape == shape and operand == kept
    if node.kind is not OpKind.POINTWISE:
        return False
    return node.shape == shape or squeezed == per_row


def _first_axes(shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether the first axes are reduced, in columns enough for all threads."""
    first = len(axes)
    return axes == tuple(range(first)) and math.prod(shape[first:]) >= _COLUMNS


def _acyclic(state: State, members: set[int], views: set[int] = frozenset()) -> bool:  # type: ignore[assignment]
    """Whether nothing that the members read from outside depends on a member."""
    mask = 0
    for m in members:
        mask |= 1 << m
    for m in members:
        for j in state.node(m).inputs:
            if j not in members and j not in views and _depends(state, j) & mask:
                return False
            if j in views and j not in members:
                base = state.node(j).inputs[0]
                while base in views:
                    base = state.node(base).inputs[0]
                if base not in members and _depends(state, base) & mask:
                    return False
    return True


def _depends(state: State, node: int) -> int:
    """Everything that must have run before ``node`` is available.

    Kernels with several outputs are taken whole.
    """
    mask = state.ancestors[node] | (1 << node)
    changed = True
    while changed:
        changed = False
        for group in state.groups:
            if len(group.outputs) > 1 and any(mask >> o & 1 for o in group.outputs):
                whole = mask
                for m in group.members:
                    whole |= state.ancestors[m] | (1 << m)
                if whole != mask:
                    mask, changed = whole, True
    return mask


def _closed(state: State, members: set[int]) -> Group:
    """The members that some output needs, and the outputs: what is read from outside."""
    outside = set(state.graph.outputs)

    def read_outside(i: int) -> bool:
        if i in outside:
            return True
        for u in state.users[i]:
            if u in members:
                continue
            if state.node(u).kind is OpKind.VIEW and u not in state.buffers:
                if read_outside(u):
                    return True
            else:
                return True
        return False

    outputs = {m for m in members if read_outside(m)}
    for m in sorted(outputs - outside, reverse=True):
        if widens(state, m):  # readers do it themselves: the buffer stays narrow
            outputs.discard(m)
            outputs.update({_viewed(state, j, members) for j in state.node(m).inputs} & members)
    return Group(members, tuple(sorted(outputs)))


def _viewed(state: State, node: int, members: set[int]) -> int:
    """What a node is, or is a view of, that may be among the members."""
    while node not in members and state.node(node).kind is OpKind.VIEW:
        node = state.node(node).inputs[0]
    return node


def widens(state: State, i: int) -> bool:
    """Whether the node is a number in a wider type, exactly, and no product or window reads it.

    Such a cast costs its readers less than a wide buffer does.
    """
    node = state.node(i)
    if node.op != "cast" or node.dtype not in FLOATS:
        return False
    narrow = state.node(node.inputs[0]).dtype
    kinds = {state.node(r).kind for r in readers(state, i)}
    exact = narrow in FLOATS and ITEMSIZE[narrow] < ITEMSIZE[node.dtype]
    return exact and not kinds & {OpKind.CONTRACT, OpKind.WINDOW}


def readers(state: State, node: int) -> list[int]:
    """Operators that read ``node``, looking through views."""
    found: list[int] = []
    for u in state.users[node]:
        if state.node(u).kind is OpKind.VIEW and u not in state.buffers:
            found.extend(readers(state, u))
        else:
            found.append(u)
    return list(dict.fromkeys(found))
