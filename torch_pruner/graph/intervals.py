"""Which values an integer node of a graph can have at all: positions that need no test."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.graph.ir import const_value
from torch_pruner.graph.ops import COMPARISONS, ITEMSIZE, OpKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.graph.ir import Node

__all__ = ["Interval", "interval", "limits"]

Interval = tuple[int, int]

_DEPTH = 24  # operators that are looked through
_CHOOSING = ("where", "take", "gather", "cat", "cast", "update")  # elements of what they read
_BOOLEAN = COMPARISONS | {"isnan", "isinf", "logical_not", "logical_and", "logical_or"}


def limits(dtype: str) -> Interval:
    """The least and the largest value of an integer dtype, or of bool."""
    if dtype == "bool":
        return 0, 1
    bits = 8 * ITEMSIZE[dtype]
    return (0, 2**bits - 1) if dtype == "uint8" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def interval(nodes: Sequence[Node], at: int, depth: int = _DEPTH) -> Interval:
    """Both ends of a range that holds every element of ``nodes[at]``, an integer or a boolean."""
    node = nodes[at]
    whole = limits(node.dtype)
    if node.op == "input" or depth == 0:
        return whole
    found = _found(nodes, node, depth - 1)
    # What leaves the dtype's range wraps.
    return found if found is not None and _within(found, whole) else whole


def _within(inner: Interval, outer: Interval) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _found(nodes: Sequence[Node], node: Node, depth: int) -> Interval | None:
    if node.op == "const":
        value = int(const_value(node))
        return value, value
    if node.op == "iota":
        return 0, max(node.shape[node.attr("dim")] - 1, 0)
    if node.op in ("argmax", "argmin"):
        (axis,) = node.attr("axes")
        return 0, max(nodes[node.inputs[0]].shape[axis] - 1, 0)
    if node.op == "window_argmax":
        source = nodes[node.inputs[0]].shape
        return 0, max(math.prod(source[len(source) - len(node.attr("kernel")) :]) - 1, 0)
    if node.op in _BOOLEAN:
        return 0, 1
    read = list(node.inputs)
    if node.op == "where":
        read = read[1:]
    elif node.op in ("take", "gather"):
        read = read[:1]
    elif node.op == "update":
        read = read[:2]
    elif node.op == "accumulate":
        return None
    if any(nodes[i].dtype.startswith(("float", "bfloat")) for i in read):
        return None
    known = [interval(nodes, i, depth) for i in read]
    if node.kind is OpKind.VIEW or node.op in _CHOOSING:
        return _union(known)
    if node.op == "pad":
        fill = int(node.attr("value"))
        return _union([*known, (fill, fill)])
    if node.op in ("max", "min", "window_max"):
        return known[0] if node.op != "window_max" else None
    return _arithmetic(node.op, known)


def _union(known: Sequence[Interval]) -> Interval:
    return min(lo for lo, _ in known), max(hi for _, hi in known)


def _arithmetic(op: str, known: Sequence[Interval]) -> Interval | None:
    if len(known) != 2:
        return (-known[0][1], -known[0][0]) if op == "neg" else None
    (a, b), (c, d) = known
    match op:
        case "add":
            return a + c, b + d
        case "sub":
            return a - d, b - c
        case "mul":
            corners = (a * c, a * d, b * c, b * d)
            return min(corners), max(corners)
        case "maximum":
            return max(a, c), max(b, d)
        case "minimum":
            return min(a, c), min(b, d)
        case "mod" if c > 0:
            return 0, d - 1
        case "floordiv" if c > 0:
            quotients = (a // c, a // d, b // c, b // d)
            return min(quotients), max(quotients)
        case "bitwise_and" if a >= 0 or c >= 0:
            return 0, min(end for start, end in known if start >= 0)
    return None
