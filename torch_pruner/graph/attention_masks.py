"""Masks of an attention: keys that count, tiles that heads share, scores that never count."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.graph.extents import false_beyond
from torch_pruner.graph.ir import const_value
from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from torch_pruner.graph.attention import Attention
    from torch_pruner.graph.ir import Graph


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


def shared_masks(graph: Graph, att: Attention) -> tuple[int, ...]:
    """Full broadcasts of data that is equal for all heads of a query: their tiles can be shared.

    Read in place they would be gathered, since lanes hold queries.
    """
    if len(att.batch) == 0 or att.batch[-1] == 1 or att.queries == 1:
        return ()
    found: set[int] = set()
    stack, seen = [att.masked], set[int]()
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        node = graph.nodes[i]
        if node.op == "broadcast" and i not in att.inner and node.shape == att.shape:
            source = graph.nodes[node.inputs[0]].shape
            tail = (1,) * (len(node.shape) - len(source)) + source
            if tail[-3] == 1 and tail[-2] != 1 and tail[-1] != 1 and _reads(graph, node.inputs[0]):
                found.add(i)
        elif (i in att.inner and i != att.scores) or node.kind is OpKind.POINTWISE:
            stack.extend(node.inputs)
    return tuple(sorted(found))


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
