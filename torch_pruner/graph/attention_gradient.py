"""Recognises the gradient of attention: five matrix products around weights that are made again.

``weights = exp(scores - row)`` with ``row`` kept by the forward, the weights' gradient, and the
three products that lead to queries, keys and values. As one kernel nothing of a query's length
times a key's has a buffer. The kernel graph stays an ordinary graph; this module says which of its
nodes play which part. No schedule, no measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.graph.attention import Scores, is_causal, product_below
from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_pruner.graph.ir import Graph, Shape

    # whether one kernel takes it
    TakesGradient = Callable[[Graph, "AttentionGradient"], bool]

_MIN_QUERIES, _MIN_KEYS, _MIN_WIDTH = 16, 16, 4
_OPERANDS = {"float32", "float16", "bfloat16"}


@dataclass(frozen=True, slots=True)
class AttentionGradient(Scores):
    """Node positions and extents. A node is *full* as in ``graph.attention``.

    ``into_queries = into k``, ``into_keys = into' q``, ``into_values = weights' g``, where ``into``
    is an elementwise function of ``weights`` and of ``along = g v'``. Where the operands are of
    half precision both are rounded to it for these products; as one kernel they need not be.
    """

    scores: int  # the product of queries and keys
    along: int  # the product of the result's gradient and values
    weights: int  # full
    into: int  # full: the gradient of the scores
    into_queries: int  # products
    into_keys: int
    into_values: int
    spread: tuple[int, ...]  # full broadcasts of one number for each query
    inner: frozenset[int]  # nodes that depend on one of the first two products, up to the others
    shape: Shape  # of full nodes
    causal: bool  # keys after the query have no weight, whatever the data

    @property
    def outputs(self) -> tuple[int, int, int]:
        return self.into_queries, self.into_keys, self.into_values


def no_gradient(graph: Graph, found: AttentionGradient) -> bool:
    """None is one kernel."""
    return False


def any_gradient(graph: Graph, found: AttentionGradient) -> bool:
    """Kernels of CPUs take whatever is recognised."""
    return True


def gradient_of(spec: Graph) -> AttentionGradient | None:
    """The gradient of attention that a kernel graph is, or None."""
    if sum(n.kind is OpKind.CONTRACT for n in spec.nodes) != 5 or len(spec.outputs) != 3:
        return None
    return next(attention_gradients(spec, spec.users()), None)


def attention_gradients(
    graph: Graph, users: Sequence[Sequence[int]]
) -> Iterator[AttentionGradient]:
    """Every gradient of attention in ``graph``."""
    for i, node in enumerate(graph.nodes):
        if node.op == "exp" and (found := _match(graph, users, i)) is not None:
            yield found


def _match(graph: Graph, users: Sequence[Sequence[int]], weights: int) -> AttentionGradient | None:
    nodes, shape = graph.nodes, graph.nodes[weights].shape
    if len(shape) < 2 or shape[-2] < _MIN_QUERIES or shape[-1] < _MIN_KEYS:
        return None
    scores = product_below(graph, weights, shape)
    if scores is None:
        return None
    into_values = _product(graph, users, weights, turned=True)
    into = _last(graph, users, weights, shape)
    if into_values is None or into is None:
        return None
    into_queries = _product(graph, users, into, turned=False)
    into_keys = _product(graph, users, into, turned=True)
    along = product_below(graph, into, shape, beside=weights)
    if into_queries is None or into_keys is None or along is None:
        return None
    outputs = (into_queries, into_keys, into_values)
    inner = _between(graph, (scores, along), outputs)
    products = {scores, along, *outputs}
    operands = [
        *nodes[scores].inputs,
        *nodes[along].inputs,
        *(nodes[i].inputs[1] for i in outputs),
    ]
    dtypes = {nodes[i].dtype for i in operands}
    if (
        len(products) != 5
        or not products <= inner
        or len(dtypes) != 1
        or not dtypes <= _OPERANDS
        or any(not _is_kept(graph, i, dtypes) for i in inner)
        or any(i in inner for i in operands)
        or not all(_plain(graph, i, shape) for i in inner - products)
        or any(u not in inner for i in inner - set(outputs) for u in users[i])
        or any(o in inner and o not in outputs for o in graph.outputs)
        or any(nodes[i].shape[-1] < _MIN_WIDTH for i in outputs)
    ):
        return None
    read = {j for i in inner - products for j in nodes[i].inputs} - inner
    spread = [
        j for j in sorted(read)
        if nodes[j].op == "broadcast"
        and nodes[j].shape == shape
        and nodes[nodes[j].inputs[0]].shape == (*shape[:-1], 1)
    ]  # fmt: skip
    difference = nodes[nodes[weights].inputs[0]]
    masked = difference.inputs[0] if difference.op == "sub" else weights
    causal = is_causal(graph, masked, shape)
    return AttentionGradient(
        scores, along, weights, into, *outputs, tuple(spread), inner, shape, causal
    )


def _is_kept(graph: Graph, i: int, operands: set[str]) -> bool:
    """Whether a node is of float32, or rounded for a product with ``operands``, and no further."""
    node = graph.nodes[i]
    if node.dtype == "float32":
        return True
    rounded = node.op == "cast" and graph.nodes[node.inputs[0]].dtype == "float32"
    return node.dtype in operands and (rounded or node.kind is OpKind.VIEW)


def _product(graph: Graph, users: Sequence[Sequence[int]], at: int, *, turned: bool) -> int | None:
    """The one product that reads ``at``, which may be rounded for it, as its first operand, its
    last two axes ``turned``."""
    found, stack = set[int](), [(at, False)]
    while stack:
        i, odd = stack.pop()
        for u in users[i]:
            node = graph.nodes[u]
            if node.op == "matmul" and node.inputs[0] == i and odd == turned:
                found.add(u)
            elif node.op == "cast" or (
                node.op == "reshape" and node.shape[-2:] == graph.nodes[i].shape[-2:]
            ):
                stack.append((u, odd))
            elif node.op == "permute" and _swaps(node.attr("perm")):
                stack.append((u, not odd))
    return found.pop() if len(found) == 1 else None


def _last(graph: Graph, users: Sequence[Sequence[int]], weights: int, shape: Shape) -> int | None:
    """The full value, computed element by element of ``weights``, that leads to queries: what it
    is rounded to is not another."""
    found, seen, stack = set[int](), set[int](), [weights]
    while stack:
        for u in users[stack.pop()]:
            node = graph.nodes[u]
            if u not in seen and node.kind is OpKind.POINTWISE and node.shape == shape:
                seen.add(u)
                stack.append(u)
                if node.op != "cast" and _product(graph, users, u, turned=False) is not None:
                    found.add(u)
    return found.pop() if len(found) == 1 else None


def _between(graph: Graph, first: tuple[int, ...], last: tuple[int, ...]) -> frozenset[int]:
    """Nodes that depend on one of ``first`` and that one of ``last`` depends on, all included."""
    after, before = set(first), set(last)
    for i in range(min(first), max(last) + 1):
        if any(j in after for j in graph.nodes[i].inputs):
            after.add(i)
    for i in range(max(last), min(first), -1):
        if i in before:
            before.update(graph.nodes[i].inputs)
    return frozenset(after & before)


def _plain(graph: Graph, i: int, shape: Shape) -> bool:
    """Whether the node is elementwise, or a view of a full value whose last axes it may turn."""
    node = graph.nodes[i]
    if node.numel != math.prod(shape):
        return False
    if node.op == "permute":
        return _swaps(node.attr("perm"))
    full = shape[-2:] in (node.shape[-2:], node.shape[:-3:-1])
    return full and (node.op == "reshape" or node.kind is OpKind.POINTWISE)


def _swaps(perm: Sequence[int]) -> bool:
    rank = len(perm)
    return tuple(perm) == (*range(rank - 2), rank - 1, rank - 2)
