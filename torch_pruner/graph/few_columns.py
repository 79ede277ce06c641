"""Convolutions to few channels as a product with all taps, and a sum over shifted results.

Vectors hold channels of a result, so one to three channels leave most lanes idle, whatever the
schedule. A product of every position with all taps at once has taps times as many columns, and no
window; what belongs to one position is then added up. That is as many multiply-adds, and a sum that
goes through memory: whether it pays is asked of whoever knows the machine. Sums are over channels
first, then over taps.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from torch_pruner.graph.ir import Graph, GraphBuilder, Node
from torch_pruner.graph.quantize import static_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Takes = Callable[[Graph, Graph], bool]  # of a convolution as it is, and of what replaces it

MOST_COLUMNS = 8
"""Channels of a result: with 8 the sum took longer than the product saved (docs/experiments.md)."""
_LEAST_CHANNELS = 8  # of what is read
_MOST_TAPS = 128  # terms of a sum


def spread_columns(graph: Graph, takes: Takes) -> Graph:
    """``graph`` whose float32 convolutions to few channels are written so where ``takes`` says."""
    found = {i for i, node in enumerate(graph.nodes) if _may(graph, node)}
    if not found or any(node.is_count for node in graph.nodes):
        return graph
    static = static_nodes(graph)
    found = {i for i in found if takes(*_alone(graph, graph.nodes[i], static))}
    if not found:
        return graph
    b = GraphBuilder()
    new: list[int] = []
    for i, node in enumerate(graph.nodes):
        inputs = tuple(new[j] for j in node.inputs)
        new.append(_spread(b, node, *inputs) if i in found else b.again(node, inputs))
    return b.finish([new[o] for o in graph.outputs])


def _may(graph: Graph, node: Node) -> bool:
    if node.op not in ("conv", "conv_transpose") or node.attr("groups") != 1:
        return False
    x, weight = (graph.nodes[i] for i in node.inputs)
    taps, stride = weight.shape[2:], node.attr("stride")
    if {node.dtype, x.dtype, weight.dtype} != {"float32"} or not node.numel:
        return False
    if node.shape[1] > MOST_COLUMNS or x.shape[1] < _LEAST_CHANNELS or min(node.attr("lo")) < 0:
        return False
    if not 1 < math.prod(taps) <= _MOST_TAPS:
        return False
    if node.op == "conv":
        return all(s == 1 for s in stride) and min(node.attr("hi")) >= 0
    dims = zip(x.shape[2:], taps, stride, node.attr("lo"), node.shape[2:], strict=True)
    whole = all(r % s == 0 and lo + out <= s * (n - 1) + r for n, r, s, lo, out in dims)
    return whole and all(d == 1 for d in node.attr("dilation"))


def _alone(graph: Graph, node: Node, static: set[int]) -> tuple[Graph, Graph]:
    """The convolution of ``node`` as a graph, and what replaces it, between values that lie
    channels last, as in a network."""
    x, weight = node.inputs
    batch, channels, *extents = graph.nodes[x].shape
    rank = len(extents)
    both = []
    for replaced in (False, True):
        b = GraphBuilder()
        given = b.input(0, (batch, *extents, channels), "float32", static=x in static)
        taps = b.input(1, graph.nodes[weight].shape, "float32", static=weight in static)
        operands = (b.permute(given, (0, rank + 1, *range(1, rank + 1))), taps)
        out = _spread(b, node, *operands) if replaced else b.again(node, operands)
        both.append(b.finish([b.permute(out, (0, *range(2, rank + 2), 1))]))
    return both[0], both[1]


def _spread(b: GraphBuilder, node: Node, x: int, weight: int) -> int:
    return (_window if node.op == "conv" else _transposed)(b, node, x, weight)


def _products(b: GraphBuilder, x: int, weight: int, perm: Sequence[int]) -> int:
    """Every position's products with all taps: (N, taps x columns, \\*S).

    ``perm`` brings the weight to (\\*taps, columns, channels).
    """
    rank = len(b.shape(x)) - 2
    (batch, channels, *extents), ones = b.shape(x), (1,) * rank
    turned = b.permute(weight, perm)
    columns = b.nodes[turned].numel // channels
    rows = b.reshape(turned, (columns, channels, *ones))
    zeros = (0,) * rank
    return b.append(
        "conv", (x, rows), (batch, columns, *extents), "float32", stride=ones, lo=zeros, hi=zeros,
        dilation=ones, groups=1,
    )  # fmt: skip


def _padded(b: GraphBuilder, x: int, lo: Sequence[int], hi: Sequence[int]) -> int:
    if not any((*lo, *hi)):
        return x
    batch, channels, *extents = b.shape(x)
    dims = (n + p + q for n, p, q in zip(extents, lo, hi, strict=True))
    return b.append(
        "pad", (x,), (batch, channels, *dims), "float32", lo=(0, 0, *lo), hi=(0, 0, *hi), value=0.0
    )


def _added(b: GraphBuilder, terms: Sequence[int]) -> int:
    total, *more = terms
    for term in more:
        total = b.pointwise("add", total, term)
    return total


def _window(b: GraphBuilder, node: Node, x: int, weight: int) -> int:
    columns, _, *taps = b.shape(weight)
    batch, _, *out = node.shape
    perm = (*range(2, 2 + len(taps)), 0, 1)
    products = _padded(b, _products(b, x, weight, perm), node.attr("lo"), node.attr("hi"))
    terms = []
    for k, tap in enumerate(itertools.product(*(range(n) for n in taps))):
        starts = (t * d for t, d in zip(tap, node.attr("dilation"), strict=True))
        terms.append(b.slice(products, (0, k * columns, *starts), (batch, columns, *out)))
    return _added(b, terms)


def _transposed(b: GraphBuilder, node: Node, x: int, weight: int) -> int:
    """Per dimension, tap ``a * stride + q`` of position ``i`` is for ``(i + a) * stride + q``."""
    _, columns, *taps = b.shape(weight)
    batch, _, *extents = b.shape(x)
    stride, rank = node.attr("stride"), len(taps)
    shifts = [r // s for r, s in zip(taps, stride, strict=True)]
    products = _products(b, x, weight, (*range(2, 2 + rank), 1, 0))
    around = [m - 1 for m in shifts]
    products = _padded(b, products, around, around)
    wide = [n + 2 * p for n, p in zip(extents, around, strict=True)]
    apart = [n for pair in zip(shifts, stride, strict=True) for n in pair]
    products = b.reshape(products, (batch, *apart, columns, *wide))
    places = [n + p for n, p in zip(extents, around, strict=True)]
    terms = []
    for shift in itertools.product(*(range(m) for m in shifts)):
        first = [n for a in shift for n in (a, 0)]
        starts = (0, *first, 0, *(p - a for p, a in zip(around, shift, strict=True)))
        ones = [n for s in stride for n in (1, s)]
        term = b.slice(products, starts, (batch, *ones, columns, *places))
        terms.append(b.reshape(term, (batch, *stride, columns, *places)))
    total = _added(b, terms)
    # (batch, q0, q1, columns, h0, h1) to (batch, columns, h0 q0, h1 q1)
    order = (n for k in range(rank) for n in (2 + rank + k, 1 + k))
    total = b.permute(total, (0, 1 + rank, *order))
    full = (n * s for n, s in zip(places, stride, strict=True))
    total = b.reshape(total, (batch, columns, *full))
    return b.slice(total, (0, 0, *node.attr("lo")), node.shape)
