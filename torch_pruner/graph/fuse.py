"""Cuts a graph into kernels: what is computed together, what gets a buffer, in which order.

A kernel is anchored at a contraction, at attention, at reductions over the same rows, at a pooling
window, or at nothing (then it is elementwise). Elementwise operators join the kernel whose result
they read; views never get a kernel, every reader carries them as index arithmetic. Pure: no torch,
no TVM, no measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.graph.attention import attentions
from torch_pruner.graph.ir import Builder, Graph, Node
from torch_pruner.graph.layout import Order, identity, storage_orders
from torch_pruner.graph.ops import EXPENSIVE, OpKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Orders = Mapping[int, Order]

_MAX_INLINE = 48  # operators of one expression before it is cut


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: ``spec``, and the nodes of the fused graph that its buffers hold."""

    spec: Graph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FusedGraph:
    """Kernels in execution order. ``orders[n]`` is the memory order of a node that has a buffer."""

    graph: Graph
    kernels: tuple[Kernel, ...]
    orders: Orders


@dataclass(slots=True)
class _Group:
    members: set[int]
    outputs: tuple[int, ...]


@dataclass(slots=True)
class _State:
    graph: Graph
    users: list[list[int]]
    ancestors: list[int]  # bit sets
    group_of: dict[int, _Group] = field(default_factory=dict)
    groups: list[_Group] = field(default_factory=list)
    buffers: set[int] = field(default_factory=set)

    def node(self, i: int) -> Node:
        return self.graph.nodes[i]


def fuse(
    graph: Graph, fixed: Orders | None = None, *, tiles: bool = False, gpu: bool = False
) -> FusedGraph:
    """Cut ``graph`` into kernels, for a ``gpu`` or a CPU; ``fixed``: memory orders of its ends.
    ``tiles``: products of bfloat16 will run in tile registers."""
    state = _State(graph, graph.users(), _ancestors(graph))
    state.buffers.update(i for i, n in enumerate(graph.nodes) if n.op == "input")
    state.buffers.update(graph.outputs)
    for found in attentions(graph, state.users, tiles=tiles, gpu=gpu):
        tail = _with_epilogue(state, found.out, views=True)
        _add_group(state, _Group(tail.members | found.inner, tail.outputs))
    for i, node in enumerate(graph.nodes):
        if node.kind is OpKind.CONTRACT and i not in state.group_of:
            _add_group(state, _with_epilogue(state, i, views=True))
    for i, node in enumerate(graph.nodes):
        if node.kind is OpKind.REDUCE and i not in state.group_of:
            _add_group(state, _rows_group(state, i))
        elif node.kind is OpKind.WINDOW:
            _add_group(state, _with_epilogue(state, i, views=False))
    _choose_buffers(state)
    ends = (*graph.inputs, *graph.outputs)
    demanded = {i: identity(len(graph.nodes[i].shape)) for i in ends} | dict(fixed or {})
    orders = storage_orders(graph, demanded)
    for group in state.groups:  # a view in the epilogue changes which axes the order speaks of
        for o in group.outputs:
            if o not in demanded and state.node(o).kind is not OpKind.CONTRACT:
                orders[o] = _order_of(state, orders, o)
    kernels = [_kernel(state, g.members, g.outputs, orders) for g in state.groups]
    grouped = {o for g in state.groups for o in g.outputs}
    singles = sorted(b for b in state.buffers - grouped if graph.nodes[b].op != "input")
    kernels += [_kernel(state, {b}, (b,), orders) for b in singles]
    return FusedGraph(graph, tuple(_in_order(kernels)), {b: orders[b] for b in state.buffers})


def _ancestors(graph: Graph) -> list[int]:
    sets: list[int] = []
    for node in graph.nodes:
        mask = 0
        for j in node.inputs:
            mask |= sets[j] | (1 << j)
        sets.append(mask)
    return sets


def _add_group(state: _State, group: _Group) -> None:
    state.groups.append(group)
    state.buffers.update(group.outputs)
    for m in group.members:
        state.group_of[m] = group


def _with_epilogue(state: _State, anchor: int, *, views: bool) -> _Group:
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
        if end != anchor and graph.nodes[end].kind is OpKind.VIEW:
            continue
        inside = {m for m in order if m == end or state.ancestors[end] >> m & 1}
        if all(
            m == end or (m not in outputs and all(u in inside for u in state.users[m]))
            for m in inside
        ):
            return _Group(inside, (end,))
    return _Group({anchor}, (anchor,))


def _rows_group(state: _State, first: int) -> _Group:
    """Reductions over the same axes of one domain and the elementwise operators around them."""
    graph = state.graph
    source = graph.nodes[first].inputs[0]
    shape, axes = graph.nodes[source].shape, graph.nodes[first].attr("axes")
    members = {first}
    stack = [source]
    while stack:  # elementwise producers of the whole rows, unless another kernel has them
        i = stack.pop()
        node = graph.nodes[i]
        if (
            i in members
            or i in state.group_of
            or node.kind is not OpKind.POINTWISE
            or node.shape != shape
        ):
            continue
        if _acyclic(state, members | {i}):
            members.add(i)
            stack.extend(node.inputs)
    if graph.nodes[first].op.startswith("arg"):
        return _closed(state, {first})
    per_row = tuple(d for k, d in enumerate(shape) if k not in axes and d != 1)
    views: set[int] = set()
    for i in range(first + 1, len(graph.nodes)):
        node = graph.nodes[i]
        if (
            i in state.group_of
            or i in members
            or not any(j in members or j in views for j in node.inputs)
        ):
            continue
        if _joins_rows(graph, node, members | views, shape, axes, per_row):
            if node.kind is OpKind.VIEW:
                views.add(i)
            elif _acyclic(state, members | {i}, views):
                members.add(i)
    return _closed(state, members)


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
        source = graph.nodes[node.inputs[0]]
        same = source.shape == shape and node.attr("axes") == axes
        return same and node.inputs[0] in inside and not node.op.startswith("arg")
    if node.op == "reshape":  # keepdim: only ones come and go
        return squeezed == per_row == tuple(d for d in graph.nodes[node.inputs[0]].shape if d != 1)
    if node.op == "broadcast":
        operand = graph.nodes[node.inputs[0]].shape
        lined_up = len(operand) == len(shape) and all(
            operand[k] == (1 if k in axes else shape[k]) for k in range(len(shape))
        )
        return node.shape == shape and lined_up
    if node.kind is not OpKind.POINTWISE:
        return False
    return node.shape == shape or squeezed == per_row


def _acyclic(state: _State, members: set[int], views: set[int] = frozenset()) -> bool:  # type: ignore[assignment]
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


def _depends(state: _State, node: int) -> int:
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


def _closed(state: _State, members: set[int]) -> _Group:
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

    return _Group(members, tuple(sorted(m for m in members if read_outside(m))))


def _choose_buffers(state: _State) -> None:
    """Decide which operators outside groups are computed once into a buffer; others are inlined."""
    size: dict[int, int] = {}
    heavy: dict[int, bool] = {}
    for i, node in enumerate(state.graph.nodes):
        if i in state.buffers or i in state.group_of or node.kind is OpKind.LEAF:
            size[i], heavy[i] = 0, False
            continue
        size[i] = sum(size[j] for j in node.inputs) + (node.kind is not OpKind.VIEW)
        heavy[i] = node.op in EXPENSIVE or any(heavy[j] for j in node.inputs)
        if node.kind is OpKind.VIEW:
            continue
        readers = _readers(state, i)
        anchors = [r for r in readers if state.node(r).kind in (OpKind.CONTRACT, OpKind.WINDOW)]
        shared = len(readers) > 1 and (heavy[i] or size[i] > 3 or node.kind is OpKind.INJECTIVE)
        repeated = heavy[i] and any(_repeats(state, i, r) for r in readers)
        reduced = node.kind is OpKind.INJECTIVE and any(
            state.node(r).kind is OpKind.REDUCE for r in readers
        )
        apart = node.op == "cat" and not _part_by_part(state, i, readers)
        if anchors or shared or repeated or reduced or apart or size[i] > _MAX_INLINE:
            state.buffers.add(i)
            size[i], heavy[i] = 0, False


def _part_by_part(state: _State, cat: int, readers: list[int]) -> bool:
    """Whether an elementwise kernel reads the concatenation alone: it is emitted part by part."""
    if len(readers) != 1 or readers != state.users[cat] or readers[0] in state.group_of:
        return False
    cats = sum(1 << k for k, n in enumerate(state.graph.nodes) if n.op == "cat")
    others = [j for j in state.node(readers[0]).inputs if j != cat]
    mixed = any((state.ancestors[j] | 1 << j) & cats for j in others)
    return state.node(readers[0]).kind is OpKind.POINTWISE and not mixed


def _readers(state: _State, node: int) -> list[int]:
    """Operators that read ``node``, looking through views."""
    found: list[int] = []
    for u in state.users[node]:
        if state.node(u).kind is OpKind.VIEW and u not in state.buffers:
            found.extend(_readers(state, u))
        else:
            found.append(u)
    return list(dict.fromkeys(found))


def _repeats(state: _State, node: int, reader: int) -> bool:
    """Whether inlining ``node`` into ``reader`` computes its elements more than once."""
    consumer = state.node(reader)
    if consumer.kind is OpKind.POINTWISE:
        return consumer.numel > state.node(node).numel
    return consumer.kind is OpKind.INJECTIVE and consumer.numel > state.node(node).numel


def _order_of(state: _State, orders: Orders, output: int) -> Order:
    rank = len(state.node(output).shape)
    return orders[output] if len(orders[output]) == rank else identity(rank)


def _kernel(state: _State, members: set[int], outputs: Sequence[int], orders: Orders) -> Kernel:
    """The kernel graph: what the outputs need down to buffers, which are inputs in memory order."""
    graph = state.graph
    builder = Builder()
    new: dict[int, int] = {}
    inputs: list[int] = []

    def visit(root: int) -> int:
        stack = [root]
        while stack:
            i = stack[-1]
            if i in new:
                stack.pop()
                continue
            node = graph.nodes[i]
            if i in state.buffers and i not in members and not _views_member(state, i, members):
                new[i] = _load(builder, node, orders[i], len(inputs))
                inputs.append(i)
                stack.pop()
                continue
            missing = [j for j in node.inputs if j not in new]
            if missing:
                stack.extend(reversed(missing))
                continue
            operands = tuple(new[j] for j in node.inputs)
            new[i] = _rebuild(builder, node, operands)
            stack.pop()
        return new[root]

    results = [builder.permute(visit(o), orders[o]) for o in outputs]
    return Kernel(builder.finish(results), tuple(inputs), tuple(outputs))


def _views_member(state: _State, node: int, members: set[int]) -> bool:
    """Whether ``node`` is a view of what this kernel computes: its buffer is only written later."""
    while state.node(node).kind is OpKind.VIEW and node not in members:
        node = state.node(node).inputs[0]
    return node in members


def _load(builder: Builder, node: Node, order: Order, index: int) -> int:
    static = node.op == "input" and bool(node.attr("static"))
    buffer = builder.input(index, (node.shape[k] for k in order), node.dtype, static=static)
    inverse = [0] * len(order)
    for position, k in enumerate(order):
        inverse[k] = position
    return builder.permute(buffer, inverse)


def _rebuild(builder: Builder, node: Node, operands: tuple[int, ...]) -> int:
    if node.op == "reshape":
        return builder.reshape(operands[0], node.shape)
    if node.op == "permute":
        return builder.permute(operands[0], node.attr("perm"))
    return builder.append(node.op, operands, node.shape, node.dtype, **dict(node.attrs))


def _in_order(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels so that each runs after those whose outputs it reads; stable in graph order."""
    made_by = {o: k for k, kernel in enumerate(kernels) for o in kernel.outputs}
    waiting = {
        k: {made_by[i] for i in kernel.inputs if i in made_by} for k, kernel in enumerate(kernels)
    }
    result: list[Kernel] = []
    done: set[int] = set()
    ranked = sorted(range(len(kernels)), key=lambda k: max(kernels[k].outputs))
    while len(result) < len(kernels):
        ready = next((k for k in ranked if k not in done and waiting[k] <= done), None)
        assert ready is not None, "kernels depend on each other"
        done.add(ready)
        result.append(kernels[ready])
    return result
