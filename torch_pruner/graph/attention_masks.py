"""Masks of an attention: keys that count, tiles that heads share, scores that never count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.graph.extents import counts_by, false_beyond, viewed
from torch_pruner.graph.ir import Graph, GraphBuilder, const_value
from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from torch_pruner.graph.attention import Attention
    from torch_pruner.graph.extents import Bounds


def counted_keys(graph: Graph, att: Attention) -> int | None:
    """The number of keys that count, the others being masked and their values zero: an input that
    says so of itself (``Node.is_count``). None: all count."""
    node = graph.nodes[att.masked]
    if node.op != "where" or graph.nodes[node.inputs[0]].shape != att.shape:
        return None
    fill = graph.nodes[node.inputs[2]]
    if fill.op != "const" or const_value(fill) != -math.inf:
        return None
    for stride, extent, count, _ in sorted(false_beyond(graph)[node.inputs[0]]):
        if (stride, extent) == (1, att.keys) and graph.nodes[count].is_count:
            return count
    return None


def visited_keys(graph: Graph, att: Attention, unneeded: Bounds) -> int | None:
    """The number of keys that a tile need not look behind (see ``counted_keys``); ``unneeded``: of
    the result. Of a causal attention the mask of the values tells it, where no query behind that
    number is needed: keys behind it are behind every query that is."""
    number = counted_keys(graph, att)
    if number is None and att.causal and (values := masked_values(graph, att)) is not None:
        queries = any(b[:3] == (att.width, att.queries, values[1]) for b in unneeded)
        return values[1] if queries else None
    return number


def masked_values(graph: Graph, att: Attention) -> tuple[int, int] | None:
    """The node that puts zeros in place of values behind a number of keys, and the input that is
    this number. None where nothing, or something else as well, is masked."""
    chain, at = list[int](), graph.nodes[att.out].inputs[1]
    while graph.nodes[at].kind is OpKind.VIEW:
        chain.append(at)
        at = graph.nodes[at].inputs[0]
    node = graph.nodes[at]
    if node.op != "where" or graph.nodes[node.inputs[0]].shape != node.shape:
        return None
    fill = graph.nodes[node.inputs[2]]
    number = counts_by(graph, node.inputs[0])
    if number is None or fill.op != "const" or const_value(fill) != 0:
        return None
    bounds = false_beyond(graph)[node.inputs[0]]
    for view in reversed(chain):
        bounds = viewed(graph, graph.nodes[view], bounds)
    along = any(b[:3] == (att.width, att.keys, number) for b in bounds)
    return (at, number) if along else None


def masks_alone(graph: Graph, att: Attention, number: int) -> bool:
    """Whether the last thing that is done to a score is the mask of those behind ``number`` keys,
    and no more than that."""
    node = graph.nodes[att.masked]
    return node.op == "where" and counts_by(graph, node.inputs[0]) == number


def shared_masks(graph: Graph, att: Attention) -> tuple[int, ...]:
    """Full broadcasts of data that is equal for all heads of a query: their tiles can be shared.

    Read in place they would be gathered, since lanes hold queries.
    """
    if len(att.batch) == 0 or att.batch[-1] == 1 or att.queries == 1:
        return ()
    return tuple(i for i in gathered_masks(graph, att) if _tail(graph, att, i)[-3] == 1)


def gathered_masks(graph: Graph, att: Attention) -> tuple[int, ...]:
    """Full broadcasts of data that differs from query to query and from key to key."""
    found: set[int] = set()
    stack, seen = [att.masked], set[int]()
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        node = graph.nodes[i]
        if node.op == "broadcast" and i not in att.inner and node.shape == att.shape:
            tail = _tail(graph, att, i)
            if tail[-2] != 1 and tail[-1] != 1 and _reads(graph, node.inputs[0]):
                found.add(i)
        elif (i in att.inner and i != att.scores) or node.kind is OpKind.POINTWISE:
            stack.extend(node.inputs)
    return tuple(sorted(found))


def _tail(graph: Graph, att: Attention, node: int) -> tuple[int, ...]:
    """The shape of what the broadcast ``node`` repeats, with as many axes as the scores have."""
    source = graph.nodes[graph.nodes[node].inputs[0]].shape
    return (1,) * (len(att.shape) - len(source)) + source


@dataclass(frozen=True, slots=True)
class ConstantMask:
    """A full broadcast of views of one static input, which kernels can be given with queries for
    neighbours.

    ``index``: of the input. ``view`` takes it to (group, key, query). ``batch``: the groups'
    extents, one for each axis before the queries, 1 where the broadcast repeats.
    """

    index: int
    view: Graph
    batch: tuple[int, ...]


def constant_masks(graph: Graph, att: Attention) -> dict[int, ConstantMask]:
    """By node: the gathered masks that depend on one static input alone, by views."""
    found: dict[int, ConstantMask] = {}
    users = graph.users()
    for node in gathered_masks(graph, att):
        chain, at = list[int](), graph.nodes[node].inputs[0]
        while graph.nodes[at].kind is OpKind.VIEW and len(users[at]) == 1:
            chain.append(at)
            at = graph.nodes[at].inputs[0]
        source = graph.nodes[at]
        if source.op != "input" or not source.attr("static") or len(users[at]) != 1:
            continue
        builder = GraphBuilder()
        x = builder.input(0, source.shape, source.dtype)
        for step in reversed(chain):
            x = builder.again(graph.nodes[step], (x,))
        *batch, queries, keys = _tail(graph, att, node)
        x = builder.permute(builder.reshape(x, (math.prod(batch), queries, keys)), (0, 2, 1))
        found[node] = ConstantMask(source.attr("index"), builder.finish([x]), tuple(batch))
    return found


_MILD = {"cast", "reshape", "tanh"}  # what is finite stays so, and grows by no more than a scale
_SCALES = 1e-3, 1e3


def hiding_mask(graph: Graph, att: Attention) -> int | None:
    """The shared mask that is added to the scores last: where it is -inf no finite score counts.

    None where there is none, or where something else than a scale comes between.
    """
    node, masks = graph.nodes[att.masked], shared_masks(graph, att)
    if node.op != "add" or node.dtype != "float32":
        return None
    for mask, value in (node.inputs, reversed(node.inputs)):
        if mask in masks and _is_scaled(graph, value, att.scores):
            return mask
    return None


def _is_scaled(graph: Graph, at: int, scores: int) -> bool:
    while at != scores:
        node = graph.nodes[at]
        if node.op == "mul" and graph.nodes[node.inputs[0]].op == "const":
            factor, at = node.inputs
        elif node.op in ("mul", "div") and graph.nodes[node.inputs[1]].op == "const":
            at, factor = node.inputs
        elif node.op in _MILD:
            (at,) = node.inputs
            continue
        else:
            return False
        low, high = _SCALES
        if not low <= abs(const_value(graph.nodes[factor])) <= high:
            return False
    return True


def _reads(graph: Graph, node: int) -> bool:
    stack = [node]
    while stack:
        i = stack.pop()
        if graph.nodes[i].op == "input":
            return True
        stack.extend(graph.nodes[i].inputs)
    return False
