"""Cuts a graph into kernels: what is computed together, what gets a buffer, in which order.

A kernel is anchored at a contraction, at attention, at reductions over the same rows, at a pooling
window, at an update, or at nothing (then it is elementwise). Elementwise operators join the kernel
whose result they read; views never get a kernel, every reader carries them as index arithmetic.
Pure: no torch, no TVM, no measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.graph._groups import (
    Group,
    State,
    ancestors,
    gradient_group,
    readers,
    rows_group,
    widens,
    windows_group,
    with_epilogue,
)
from torch_pruner.graph._in_stored_order import in_stored_order
from torch_pruner.graph._together import together
from torch_pruner.graph._turned import turn_reads
from torch_pruner.graph.attention import any_attention, attentions, is_small, no_attention
from torch_pruner.graph.attention_gradient import attention_gradients, no_gradient
from torch_pruner.graph.attention_masks import masked_values, visited_keys
from torch_pruner.graph.cuts import AGAIN, APART, NO_CUTS, ONCE, PARTS, PLANES, Site, of_kind
from torch_pruner.graph.extents import bounded, unneeded
from torch_pruner.graph.ir import Graph, GraphBuilder, Node
from torch_pruner.graph.layout import Order, identity, in_either_order, storage_orders
from torch_pruner.graph.ops import EXPENSIVE, OpKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.graph.attention import Attention, Takes
    from torch_pruner.graph.attention_gradient import TakesGradient
    from torch_pruner.graph.cuts import Cuts
    from torch_pruner.graph.extents import Bounds

    Orders = Mapping[int, Order]

_MAX_INLINE = 48  # operators of one expression before it is cut
_FEW_POSITIONS = 16  # elements that each position serves at least: then there are few of them
# What reads elements of its operands more than once.
_REREADING = (OpKind.CONTRACT, OpKind.WINDOW, OpKind.RECURRENCE, OpKind.GROUPED)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: ``spec``, and the nodes of the fused graph that its buffers hold."""

    spec: Graph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FusedGraph:
    """Kernels in execution order. ``orders[n]`` is the memory order of a node that has a buffer.

    ``sites`` are the decisions that could have been taken otherwise.
    """

    graph: Graph
    kernels: tuple[Kernel, ...]
    orders: Orders
    sites: tuple[Site, ...] = ()


def fuse(
    graph: Graph,
    fixed: Orders | None = None,
    *,
    tiles: bool = False,
    attention: Takes = any_attention,
    few_queries: Takes = no_attention,
    gradients: TakesGradient = no_gradient,
    values_masked: bool = True,
    cuts: Cuts = NO_CUTS,
) -> FusedGraph:
    """Cut ``graph`` into kernels; ``fixed``: memory orders of its ends; ``cuts``: where it is done
    otherwise than rules say.

    ``tiles``: products of bfloat16 will run in tile registers. ``attention``: which is one kernel;
    ``few_queries``: which of those with too few queries for the other rule. ``gradients``: which
    gradient of attention is one kernel. ``values_masked``:
    kernels of attention read no values behind the keys that count, so nobody else masks them.
    """
    state = State(graph, graph.users(), ancestors(graph), cuts=cuts)
    ends = (*graph.inputs, *graph.outputs)
    state.buffers.update(ends)
    demanded = {i: identity(len(graph.nodes[i].shape)) for i in ends} | dict(fixed or {})
    orders = storage_orders(graph, demanded, of_kind(cuts, PLANES))
    state.sites += [Site(PLANES, i) for i in in_either_order(graph, demanded)]
    taken = attentions(graph, state.users, tiles=tiles, takes=attention, few=few_queries)
    bounds, masked = unneeded(graph), set[int]()
    for found in taken:
        if found.row is not None:  # what comes after might wait for it
            _add_group(state, Group(set(found.inner | found.extra), (found.out, found.row)))
            continue
        if state.otherwise(PARTS, found.out):
            continue
        tail = with_epilogue(state, found.out, views=True)
        masks = _mask_of_values(state, found, bounds[found.out]) if values_masked else set()
        masked |= {_source(state, graph.nodes[i].inputs[1]) for i in masks}
        _add_group(state, Group(tail.members | found.inner | masks, tail.outputs))
    for gradient in attention_gradients(graph, state.users):
        if gradients(graph, gradient):
            _add_group(state, gradient_group(state, gradient))
    for i, node in enumerate(graph.nodes):
        if node.kind is OpKind.CONTRACT and i not in state.group_of:
            _add_group(state, _contraction(state, i))
    for i, node in enumerate(graph.nodes):
        if node.kind in (OpKind.UPDATE, OpKind.GROUPED):
            _add_group(state, Group({i}, (i,)))
        elif node.kind is OpKind.RECURRENCE:
            _add_group(state, _with_views(state, i))
    for i, node in enumerate(graph.nodes):
        if node.kind is OpKind.REDUCE and i not in state.group_of:
            _add_group(state, rows_group(state, i))
        elif node.kind is OpKind.WINDOW and i not in state.group_of:
            _add_group(state, windows_group(state, i, orders))
    turn_reads(state, orders)
    for i in masked:  # computed once, and not with every element that a tile reads
        if state.node(i).kind is not OpKind.LEAF and i not in state.group_of:
            state.buffers.add(i)
    _choose_buffers(state)
    for group in state.groups:  # a view in the epilogue changes which axes the order speaks of
        for o in group.outputs:
            if o not in demanded and state.node(o).kind is not OpKind.CONTRACT:
                orders[o] = _order_of(state, orders, o)
    kernels = [_kernel(state, g.members, g.outputs, orders, bounds) for g in state.groups]
    singles = _singles(state)
    units = together(state, singles, orders, bounds)
    kernels += [_kernel(state, set(made), made, orders, bounds) for made in units]
    lie = {b: orders[b] for b in state.buffers}
    return FusedGraph(graph, tuple(_in_order(kernels)), lie, tuple(dict.fromkeys(state.sites)))


def _singles(state: State) -> list[int]:
    """Buffers that no group makes."""
    grouped = {o for g in state.groups for o in g.outputs}
    return sorted(b for b in state.buffers - grouped if state.node(b).op != "input")


def _contraction(state: State, anchor: int) -> Group:
    """A product or convolution and what follows it."""
    group = with_epilogue(state, anchor, views=True)
    plain = all(state.node(m).kind is OpKind.VIEW for m in group.members - {anchor})
    if plain or not state.otherwise(APART, anchor):
        return group
    return Group({anchor}, (anchor,))


def _add_group(state: State, group: Group) -> None:
    state.groups.append(group)
    state.buffers.update(group.outputs)
    for m in group.members:
        state.group_of[m] = group


def _mask_of_values(state: State, found: Attention, unneeded: Bounds) -> set[int]:
    """What masks values of an attention, if its kernel reads none of those that are masked, and
    nobody else reads them."""
    mask = None if is_small(found) else masked_values(state.graph, found)
    if mask is None or visited_keys(state.graph, found, unneeded) != mask[1]:
        return set()
    shared = mask[0] in state.buffers or readers(state, mask[0]) != [found.out]
    return set() if shared else {mask[0]}


def _source(state: State, node: int) -> int:
    """What a node is a view of."""
    while state.node(node).kind is OpKind.VIEW:
        node = state.node(node).inputs[0]
    return node


def _with_views(state: State, anchor: int) -> Group:
    """The anchor and the views after it, if a view is all that is made of it and leaves the graph:
    it is written as it leaves."""
    end, members = anchor, {anchor}
    while end not in state.graph.outputs and len(state.users[end]) == 1:
        (user,) = state.users[end]
        if state.node(user).op not in ("reshape", "permute"):
            break
        end = user
        members.add(end)
    return Group(members, (end,)) if end in state.graph.outputs else Group({anchor}, (anchor,))


def _choose_buffers(state: State) -> None:
    """Decide which operators outside groups are computed once into a buffer; others are inlined."""
    size: dict[int, int] = {}
    heavy: dict[int, bool] = {}
    for i, node in enumerate(state.graph.nodes):
        if i in state.buffers or i in state.group_of or node.kind is OpKind.LEAF:
            size[i], heavy[i] = 0, False
            continue
        size[i] = _inlined(state, i, size) + (node.kind is not OpKind.VIEW)
        heavy[i] = node.op in EXPENSIVE or any(heavy[j] for j in node.inputs)
        if node.kind is OpKind.VIEW:
            continue
        read_by = _readers_of_value(state, i)
        anchors = [r for r in read_by if state.node(r).kind in _REREADING]
        costly = heavy[i] or size[i] > 3 or node.kind is OpKind.INJECTIVE
        shared = len(read_by) > 1 and costly and not _meet(state, i, read_by)
        repeated = heavy[i] and any(_repeats(state, i, r) for r in read_by)
        reduced = node.kind is OpKind.INJECTIVE and any(
            state.node(r).kind is OpKind.REDUCE for r in read_by
        )
        apart = node.op == "cat" and not _part_by_part(state, i, readers(state, i))
        needed = bool(anchors) or repeated or reduced or apart or size[i] > _MAX_INLINE
        if not needed and len(read_by) > 1:
            shared = shared != state.otherwise(AGAIN if shared else ONCE, i)
        if needed or shared:
            state.buffers.add(i)
            size[i], heavy[i] = 0, False


def _inlined(state: State, node: int, size: Mapping[int, int]) -> int:
    """Operators of one element's expression below a node, as they count.

    What elementwise operators share is computed once; what views and positions are read at, once
    for each reader. Positions are computed once a line, which they serve, and of a concatenation
    each part is a loop of its own.
    """
    n = state.node(node)
    if n.op == "cat":
        return max(size[j] for j in n.inputs)
    if n.op == "take" and state.node(n.inputs[1]).numel * _FEW_POSITIONS <= n.numel:
        return size[n.inputs[0]] + min(size[n.inputs[1]], 1)
    if n.kind is not OpKind.POINTWISE:
        return sum(size[j] for j in n.inputs)
    seen = set(n.inputs)
    count, todo = 0, list(seen)
    while todo:
        i = todo.pop()
        below = state.node(i)
        if below.kind is not OpKind.POINTWISE or not size[i]:
            count += size[i]
            continue
        count += 1
        todo += set(below.inputs) - seen
        seen.update(below.inputs)
    return count


def _meet(state: State, node: int, read_by: Sequence[int]) -> bool:
    """Whether all that is made of ``node`` meets in one expression of as many elements: its kernel
    computes ``node`` once for each of them. What is looked up may be read for more."""
    looked_up = state.node(node).op in ("take", "gather")
    waiting, elements = set(read_by), state.node(node).numel
    for _ in range(_MAX_INLINE):
        i = min(waiting)
        reader = state.node(i)
        takes = looked_up and reader.op in ("take", "gather") and reader.inputs[1] != node
        if i in state.group_of or not (takes or reader.kind is OpKind.POINTWISE):
            return False
        if takes:
            elements = reader.numel
        elif reader.numel != elements:
            return False
        if len(waiting) == 1:
            return True
        ahead = readers(state, i)
        if i in state.buffers or not ahead:
            return False
        waiting = (waiting - {i}) | set(ahead)
    return False


def _readers_of_value(state: State, node: int) -> list[int]:
    """Operators that read ``node`` or what it is in a wider type."""
    found: list[int] = []
    for r in readers(state, node):
        wider = r not in state.buffers and r not in state.group_of and widens(state, r)
        found.extend(readers(state, r) if wider else [r])
    return list(dict.fromkeys(found))


def _part_by_part(state: State, cat: int, read_by: list[int]) -> bool:
    """Whether an elementwise kernel reads the concatenation alone: it is emitted part by part."""
    if len(read_by) != 1 or read_by != state.users[cat] or read_by[0] in state.group_of:
        return False
    cats = sum(1 << k for k, n in enumerate(state.graph.nodes) if n.op == "cat")
    others = [j for j in state.node(read_by[0]).inputs if j != cat]
    mixed = any((state.ancestors[j] | 1 << j) & cats for j in others)
    return state.node(read_by[0]).kind is OpKind.POINTWISE and not mixed


def _repeats(state: State, node: int, reader: int) -> bool:
    """Whether inlining ``node`` into ``reader`` computes its elements more than once."""
    consumer = state.node(reader)
    if consumer.kind is OpKind.POINTWISE:
        return consumer.numel > state.node(node).numel
    return consumer.kind is OpKind.INJECTIVE and consumer.numel > state.node(node).numel


def _order_of(state: State, orders: Orders, output: int) -> Order:
    rank = len(state.node(output).shape)
    return orders[output] if len(orders[output]) == rank else identity(rank)


def _kernel(
    state: State,
    members: set[int],
    outputs: Sequence[int],
    orders: Orders,
    bounds: Sequence[Bounds],
) -> Kernel:
    """The kernel graph: what the outputs need down to buffers, which are inputs in memory order.

    ``bounds``: what no reader needs of a node.
    """
    graph = state.graph
    builder = GraphBuilder()
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

    def result(o: int, needed: Bounds) -> int:
        made = visit(o)
        counts = [b._replace(number=visit(b.number)) for b in sorted(needed)]
        return builder.permute(bounded(builder, made, counts), orders[o])

    results = [result(o, bounds[o]) for o in outputs]
    for k, o in enumerate(outputs):  # a part of a value, and the value itself: two outputs still
        if results.count(results[k]) > 1 and bounds[o]:
            results[k] = result(o, frozenset())
    return Kernel(in_stored_order(builder.finish(results)), tuple(inputs), tuple(outputs))


def _views_member(state: State, node: int, members: set[int]) -> bool:
    """Whether ``node`` is a view of what this kernel computes: its buffer is only written later."""
    while state.node(node).kind is OpKind.VIEW and node not in members:
        node = state.node(node).inputs[0]
    return node in members


def _load(builder: GraphBuilder, node: Node, order: Order, index: int) -> int:
    static = node.op == "input" and bool(node.attr("static"))
    shape = (node.shape[k] for k in order)
    buffer = builder.input(
        index, shape, node.dtype, static=static, coded=node.is_coded, counts=node.is_count
    )
    return builder.permute(buffer, [order.index(k) for k in range(len(order))])


def _rebuild(builder: GraphBuilder, node: Node, operands: tuple[int, ...]) -> int:
    if node.op == "reshape":
        return builder.reshape(operands[0], node.shape)
    if node.op == "permute":
        return builder.permute(operands[0], node.attr("perm"))
    return builder.again(node, operands)


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
