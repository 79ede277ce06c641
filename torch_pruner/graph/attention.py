"""Recognises attention: two matrix products with a softmax over the last axis between them.

``softmax(mask(q k)) v`` is one kernel when nothing else reads what lies between the products: the
scores then never get a buffer. The kernel graph stays an ordinary graph; this module says which of
its nodes play which part. No schedule, no measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch_pruner.graph.attention_masks import shared_masks
from torch_pruner.graph.contraction import accumulator
from torch_pruner.graph.ir import Graph, GraphBuilder, Shape, const_value
from torch_pruner.graph.ops import FLOATS, OpKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    Takes = Callable[[Graph, "Attention"], bool]  # whether kernels of a device take an attention

# From here on one kernel is faster (docs/experiments.md). Below, where vectors of queries or of
# columns would be mostly padding, estimates decide (compiler/one_kernel.py).
MIN_QUERIES = 16
MIN_KEYS, MIN_WIDTH = 16, 16
# Where tiles multiply bfloat16 many times faster, scores in memory cost less than doing without.
MIN_KEYS_IN_TILES = 1024
MAX_ON_GPU = 256  # elements of a head: sums are kept in registers


class Scores:
    """The extents of nodes that are full: see ``Attention``."""

    __slots__ = ()
    shape: Shape

    @property
    def batch(self) -> Shape:
        return self.shape[:-2]

    @property
    def groups(self) -> int:
        return math.prod(self.shape[:-2])

    @property
    def queries(self) -> int:
        return self.shape[-2]

    @property
    def keys(self) -> int:
        return self.shape[-1]


@dataclass(frozen=True, slots=True)
class Attention(Scores):
    """Node positions and extents of ``out[g, q, :] = sum_k softmax_k(masked[g, q, k]) v[g, k, :]``.

    A node is *full* when it has one element per (group, query, key), its last two axes being query
    and key; ``masked``, ``powers`` and the broadcasts are full.
    """

    scores: int  # the first product
    out: int  # the second product
    masked: int  # what the softmax is taken of
    top: int  # its maximum along the keys
    powers: int  # exp(masked - top)
    total: int  # their sum
    divisor: int  # the broadcast of a function of total
    spread: tuple[int, ...]  # broadcasts of functions of top that powers reads
    inner: frozenset[int]  # nodes that depend on scores, up to out
    shape: Shape  # of masked
    depth: int
    width: int
    factor: int | None  # what weights are multiplied by, full: scales of int8 values
    causal: bool  # keys after the query are masked, whatever the data
    row: int | None = None  # a number of each query that others read: a function of top and total
    extra: frozenset[int] = frozenset()  # the nodes that only lead to it


def attention_of(spec: Graph) -> Attention | None:
    """The attention that a kernel graph is, or None: a kernel graph has at most one."""
    anchors = [i for i, n in enumerate(spec.nodes) if n.kind is OpKind.CONTRACT]
    return match_attention(spec, spec.users(), anchors[-1]) if len(anchors) == 2 else None


def any_attention(graph: Graph, found: Attention) -> bool:
    """Kernels of CPUs take whatever is recognised."""
    return True


def no_attention(graph: Graph, found: Attention) -> bool:
    """None is one kernel."""
    return False


def fits_tensor_cores(graph: Graph, found: Attention) -> bool:
    """Whether a GPU's kernel takes it: operands of one half-precision type, heads not too wide."""
    operands = (*graph.nodes[found.scores].inputs, graph.nodes[found.out].inputs[1])
    dtypes = {graph.nodes[i].dtype for i in operands}
    narrow = max(found.depth, found.width) <= MAX_ON_GPU
    return dtypes in ({"float16"}, {"bfloat16"}) and narrow and found.row is None


def attentions(
    graph: Graph, users: Sequence[Sequence[int]], *, tiles: bool, takes: Takes, few: Takes
) -> Iterator[Attention]:
    """Every attention in ``graph`` that is worth a kernel of its own.

    Of many queries, keys and columns it is one that a kernel ``takes``, of few one for which
    ``few`` says so. ``tiles``: products of bfloat16 run in tile registers, outside of such a
    kernel.
    """
    for i, node in enumerate(graph.nodes):
        if node.op == "matmul" and (found := match_attention(graph, users, i)) is not None:
            if is_small(found):
                if found.row is None and few(graph, found):
                    yield found
                continue
            tiled = tiles and graph.nodes[node.inputs[1]].dtype == "bfloat16"
            long = found.keys >= MIN_KEYS_IN_TILES or not tiled
            if found.factor is None and long and takes(graph, found):
                yield found


def is_small(found: Attention) -> bool:
    """Whether one kernel may be slower than three, as estimates have to tell."""
    return found.queries < MIN_QUERIES or found.keys < MIN_KEYS or found.width < MIN_WIDTH


def alone(graph: Graph, inner: Collection[int], outputs: Sequence[int]) -> Graph:
    """Nodes as a graph: what they read beside views and what no input has a part in are its
    inputs."""
    builder, new, inputs = GraphBuilder(), dict[int, int](), 0
    given = set[int]()  # depends on an input
    for i, node in enumerate(graph.nodes):
        if node.op == "input" or any(j in given for j in node.inputs):
            given.add(i)

    def inside(i: int) -> bool:
        return i in inner or i not in given or graph.nodes[i].kind is OpKind.VIEW

    wanted, stack = set(inner), list(inner)
    while stack:
        i = stack.pop()
        below = [j for j in graph.nodes[i].inputs if inside(i) and j not in wanted]
        wanted.update(below)
        stack.extend(below)
    for i in sorted(wanted):
        node = graph.nodes[i]
        if inside(i):
            operands = [new[j] for j in node.inputs]
            new[i] = builder.again(node, operands)
        else:
            new[i] = builder.input(inputs, node.shape, node.dtype)
            inputs += 1
    return builder.finish([new[o] for o in outputs])


def match_attention(graph: Graph, users: Sequence[Sequence[int]], out: int) -> Attention | None:
    """The attention that ends in the product ``out``, or None."""
    nodes = graph.nodes
    weights, value = nodes[out].inputs
    if nodes[out].op != "matmul" or nodes[out].dtype not in FLOATS:
        return None
    at = weights
    while nodes[at].op in ("cast", "reshape"):
        at = nodes[at].inputs[0]
    factor = None
    if nodes[at].op == "mul":
        left, right = nodes[at].inputs
        at, factor = (left, right) if nodes[left].op == "div" else (right, left)
    if nodes[at].op != "div":
        return None
    powers, divisor = nodes[at].inputs
    shape = nodes[powers].shape
    if nodes[divisor].op != "broadcast" or len(shape) < 2 or shape != nodes[at].shape:
        return None
    total = _reduction(graph, divisor, "sum", shape)
    if total is None or nodes[total].inputs[0] != powers:
        return None
    found = _below(graph, powers, shape)
    if found is None:
        return None
    scores, masked, top, spread = found
    inner = _between(graph, scores, out)
    keys, width = shape[-1], nodes[value].shape[-1]
    row, extra = _read_row(graph, users, inner - {out}, (top, total), shape)
    if (
        nodes[weights].shape[-2:] != shape[-2:]
        or {total, top} != {i for i in inner if nodes[i].kind is OpKind.REDUCE}
        or value in inner
        or (factor is not None and (factor in inner or nodes[factor].shape != shape))
        or not all(_plain(graph, i, inner, shape) for i in inner - {scores, out})
        or any(u not in inner | extra for i in inner - {out} for u in users[i])
        or any(o in inner and o != out for o in graph.outputs)
        or accumulator(nodes[scores].dtype) != accumulator(nodes[out].dtype)
        or nodes[masked].dtype != accumulator(nodes[scores].dtype)
        or keys < 2
        or math.prod(shape) == 0
    ):
        return None
    depth = nodes[nodes[scores].inputs[0]].shape[-1]
    causal = is_causal(graph, masked, shape)
    return Attention(
        scores, out, masked, top, powers, total, divisor, spread, inner, shape, depth, width,
        factor, causal, row, extra,
    )  # fmt: skip


def _below(graph: Graph, powers: int, shape: Shape) -> tuple[int, int, int, tuple[int, ...]] | None:
    """(scores, masked, top, broadcasts of top) under ``powers``, which must be an exponential."""
    nodes = graph.nodes
    if nodes[powers].op not in ("exp", "exp2"):
        return None
    difference = nodes[powers].inputs[0]
    if nodes[difference].op != "sub":
        return None
    masked, spread = nodes[difference].inputs
    if nodes[masked].shape != shape or nodes[spread].op != "broadcast":
        return None
    top = _reduction(graph, spread, "max", shape)
    if top is None or nodes[top].inputs[0] != masked:
        return None
    scores = product_below(graph, masked, shape)
    return None if scores is None else (scores, masked, top, (spread,))


def _reduction(graph: Graph, spread: int, op: str, shape: Shape) -> int | None:
    """The reduction along the keys whose function the broadcast ``spread`` repeats."""
    nodes = graph.nodes
    row = nodes[spread].inputs[0]
    if nodes[spread].shape != shape or nodes[row].shape != (*shape[:-1], 1):
        return None
    found: set[int] = set()
    stack = [row]
    while stack:
        node = nodes[i := stack.pop()]
        if node.kind is OpKind.REDUCE:
            found.add(i)
        elif node.op == "reshape" or node.kind is OpKind.POINTWISE:
            stack.extend(node.inputs)
        elif node.op != "const":
            return None
    if len(found) != 1:
        return None
    (at,) = found
    last = nodes[at].attr("axes") == (len(shape) - 1,)
    return at if nodes[at].op == op and last else None


def product_below(graph: Graph, masked: int, shape: Shape, beside: int = -1) -> int | None:
    """The one product that ``masked`` is an elementwise function of, ``beside`` another value."""
    nodes, found, seen = graph.nodes, set[int](), {beside}
    stack = [masked]
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        node = nodes[i]
        full = node.numel == math.prod(shape) and node.shape[-2:] == shape[-2:]
        if node.op == "matmul" and full:
            found.add(i)
        elif full and (node.kind is OpKind.POINTWISE or node.op == "reshape"):
            stack.extend(node.inputs)
    return found.pop() if len(found) == 1 else None


def _read_row(
    graph: Graph,
    users: Sequence[Sequence[int]],
    inner: frozenset[int],
    reductions: tuple[int, int],
    shape: Shape,
) -> tuple[int | None, frozenset[int]]:
    """A function of the reductions that others read, as the logarithm of a row's sum, and the nodes
    that lead to it; None where there is none, or more than one."""
    nodes, rows, extra = graph.nodes, math.prod(shape[:-1]), set[int]()
    for i in range(min(reductions), len(nodes)):
        node = nodes[i]
        fits = node.kind is OpKind.POINTWISE or node.op == "reshape"
        known = [j in extra or (j in inner and nodes[j].numel == rows) for j in node.inputs]
        given = [k or nodes[j].op == "const" for k, j in zip(known, node.inputs, strict=True)]
        if i not in inner and fits and node.numel == rows and any(known) and all(given):
            extra.add(i)
    while views := [
        i for i in extra
        if nodes[i].op == "reshape" and i not in graph.outputs
        and not extra.intersection(users[i])
    ]:  # fmt: skip
        extra.difference_update(views)
    read = {i for i in extra if i in graph.outputs or any(u not in extra for u in users[i])}
    if len(read) != 1 or nodes[max(read)].kind is not OpKind.POINTWISE:
        return None, frozenset()
    return read.pop(), frozenset(extra)


def _between(graph: Graph, first: int, last: int) -> frozenset[int]:
    """Nodes that depend on ``first`` and that ``last`` depends on, both included."""
    after = {first}
    for i in range(first + 1, last + 1):
        if any(j in after for j in graph.nodes[i].inputs):
            after.add(i)
    before = {last}
    for i in range(last, first, -1):
        if i in before:
            before.update(graph.nodes[i].inputs)
    return frozenset(after & before)


def _plain(graph: Graph, i: int, inner: Iterable[int], shape: Shape) -> bool:
    """Whether the node is elementwise at one (group, query, key) or one (group, query)."""
    node, rows = graph.nodes[i], math.prod(shape[:-1])
    if node.kind is OpKind.REDUCE:
        return graph.nodes[node.inputs[0]].shape == shape
    if node.op == "broadcast":
        return node.shape == shape and graph.nodes[node.inputs[0]].shape == (*shape[:-1], 1)
    if node.op != "reshape" and node.kind is not OpKind.POINTWISE:
        return False
    full = node.numel == rows * shape[-1] and node.shape[-2:] == shape[-2:]
    sizes = {graph.nodes[j].numel for j in node.inputs if j in inner}
    return (full or node.numel == rows) and sizes == {node.numel}


def is_causal(graph: Graph, masked: int, shape: Shape) -> bool:
    """Whether ``masked`` is -inf wherever the key's position exceeds the query's."""
    node = graph.nodes[masked]
    if node.op != "where":
        return False
    condition, _, otherwise = node.inputs
    fill = graph.nodes[otherwise]
    if fill.op != "const" or const_value(fill) != -math.inf:
        return False
    while graph.nodes[condition].op == "broadcast":
        condition = graph.nodes[condition].inputs[0]
    test = graph.nodes[condition]
    if test.op != "le" or test.shape[-2:] != shape[-2:]:
        return False
    sides = [graph.nodes[j] for j in test.inputs]
    rank = len(test.shape)
    places = [n.attr("dim") if n.op == "iota" and len(n.shape) == rank else -1 for n in sides]
    return places == [rank - 1, rank - 2]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How attention is cut: a unit is one tile of ``lanes`` queries of one head.

    ``slots`` vectors of ``column`` elements cover a row of values; ``masks`` are the nodes whose
    tiles are copied to scratch.
    """

    lanes: int
    tiles: int
    units: int
    tasks: int
    per_task: int
    column: int
    slots: int
    masks: tuple[int, ...]


class PlanDecisions(Protocol):
    """The decisions of a schedule that say how attention is cut."""

    @property
    def vl(self) -> int:
        """Queries of one vector."""

    @property
    def nv(self) -> int:
        """Vectors of queries in a tile."""

    @property
    def order(self) -> int:
        """Order of units: 0 head by head, 1 the heads of a tile together."""

    @property
    def turned(self) -> int:
        """1: lanes hold queries in the second product, and not columns."""

    @property
    def tasks(self) -> int:
        """Parallel tasks."""


def attention_plan(spec: Graph, att: Attention, decisions: PlanDecisions) -> AttentionPlan:
    """The cut of ``att`` that ``decisions`` make."""
    lanes, turned = decisions.vl * decisions.nv, decisions.turned
    tiles = -(-att.queries // lanes)
    units = att.groups * tiles
    per_task = -(-units // max(1, min(decisions.tasks, units)))
    column = decisions.vl if att.width >= decisions.vl and not turned else 1
    masks = shared_masks(spec, att) if decisions.order else ()
    tasks = -(-units // per_task)
    slots = -(-att.width // column)
    return AttentionPlan(lanes, tiles, units, tasks, per_task, column, slots, masks)
