"""Exponentials of which less is asked: those known not to exceed one, of values less their maximum,
as a softmax has, or of squares with a negative factor, as a bell curve has; those that are only
added to one, as a sigmoid has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.graph.ir import const_value

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Node


def is_at_most_one(graph: Graph, at: int) -> bool:
    """Whether the node is exp(c x x), c not positive, or exp(x - m), m the maximum of x along some
    axes, or NaN.

    Where m is -inf, another constant may stand for it: then all of x is -inf.
    """
    node = graph.nodes[at]
    if node.op != "exp":
        return False
    if _is_negative_square(graph, graph.nodes[node.inputs[0]]):
        return True
    difference = graph.nodes[node.inputs[0]]
    if difference.op != "sub":
        return False
    x, spread = difference.inputs
    if graph.nodes[spread].op != "broadcast" or graph.nodes[x].shape != difference.shape:
        return False
    row = graph.nodes[spread].inputs[0]
    top = _reshaped(graph, _guarded(graph, _reshaped(graph, row)))
    found = graph.nodes[top]
    if found.op != "max" or found.inputs != (x,):
        return False
    axes = found.attr("axes")
    kept = tuple(1 if i in axes else n for i, n in enumerate(graph.nodes[x].shape))
    return graph.nodes[row].shape == kept


def _is_negative_square(graph: Graph, node: Node) -> bool:
    if node.op != "mul":
        return False
    given = [graph.nodes[_spread(graph, i)] for i in node.inputs]
    squares = [n for n in given if n.op == "mul" and n.inputs[0] == n.inputs[1]]
    factors = [n for n in given if n.op == "const" and const_value(n) <= 0]
    return len(squares) == len(factors) == 1


def is_beside_one(graph: Graph, at: int) -> bool:
    """Whether the node is an exponential that nothing reads but sums with one, in its own type."""
    node = graph.nodes[at]
    if node.op != "exp" or at in graph.outputs:
        return False
    users = [n for n in graph.nodes if at in n.inputs]
    return all(n.op == "add" and n.dtype == node.dtype and _adds_one(graph, n, at) for n in users)


def _adds_one(graph: Graph, total: Node, term: int) -> bool:
    others = [graph.nodes[_spread(graph, i)] for i in total.inputs if i != term]
    return len(others) == 1 and others[0].op == "const" and const_value(others[0]) == 1.0


def _reshaped(graph: Graph, at: int) -> int:
    while graph.nodes[at].op == "reshape":
        at = graph.nodes[at].inputs[0]
    return at


def _guarded(graph: Graph, at: int) -> int:
    """The ``m`` of where(m == -inf, a finite constant, m), else the node itself."""
    node = graph.nodes[at]
    if node.op != "where":
        return at
    condition, instead, top = node.inputs
    test, fill = graph.nodes[condition], graph.nodes[_spread(graph, instead)]
    if test.op != "eq" or fill.op != "const" or not math.isfinite(const_value(fill)):
        return at
    sides = [_spread(graph, i) for i in test.inputs]
    lowest = [
        i
        for i in sides
        if graph.nodes[i].op == "const" and const_value(graph.nodes[i]) == -math.inf
    ]
    return top if top in sides and lowest else at


def _spread(graph: Graph, at: int) -> int:
    while graph.nodes[at].op == "broadcast":
        at = graph.nodes[at].inputs[0]
    return at
