"""Splits off what depends on parameters alone: it is computed once, not at every call."""

from __future__ import annotations

from dataclasses import dataclass

from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.ops import FLOATS, ITEMSIZE, OpKind

_MAX_GROWTH = 4  # a hoisted value may be this many times larger than what it is made from
_MAX_LOOKED_UP = 1 << 18  # elements of what is looked up: that costs more than reading it


@dataclass(frozen=True, slots=True)
class Hoisted:
    """``prepare`` maps static inputs to new static inputs of ``graph``.

    ``sources`` are the indices of what it reads in the original graph.
    """

    graph: Graph
    prepare: Graph | None
    sources: tuple[int, ...]


def with_changing_inputs(graph: Graph) -> Graph:
    """``graph`` with no static input: nothing is kept of what may change from call to call."""
    builder = GraphBuilder()
    for node in graph.nodes:
        if node.op == "input":
            builder.input(node.attr("index"), node.shape, node.dtype)
        else:
            builder.again(node, node.inputs)
    return builder.finish(graph.outputs)


def hoist_static(graph: Graph) -> Hoisted:
    """Move computed static values out of ``graph``.

    Its inputs keep their indices; new ones are appended.
    """
    static = _static_nodes(graph)
    users = graph.users()
    outputs = set(graph.outputs)
    cut = [
        i
        for i in sorted(static)
        if graph.nodes[i].kind not in (OpKind.LEAF, OpKind.VIEW)
        and (
            i in outputs
            or any(u not in static or graph.nodes[u].kind is OpKind.VIEW for u in users[i])
        )
        and (i in outputs or (_leaves(graph, users, static, i) and not _widened(graph, users, i)))
    ]
    if not cut:
        return Hoisted(graph, None, ())
    prepare, sources = _extract(graph, cut)
    first = len(graph.inputs)
    builder = GraphBuilder()
    new: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        if i in cut:
            new[i] = builder.input(first + cut.index(i), node.shape, node.dtype, static=True)
        else:
            new[i] = builder.again(node, (new[j] for j in node.inputs))
    return Hoisted(builder.finish([new[o] for o in graph.outputs]), prepare, sources)


def _static_nodes(graph: Graph) -> set[int]:
    """Nodes that depend on static inputs (at least one) and constants only, and did not grow."""
    static: set[int] = set()
    size: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        if node.op == "input":
            if node.attr("static"):
                static.add(i)
                size[i] = node.numel
        elif node.inputs and any(j in static for j in node.inputs):
            others = (j for j in node.inputs if j not in static)
            origin = sum(size[j] for j in node.inputs if j in static)
            most = _MAX_GROWTH * origin
            if node.op in ("take", "gather"):
                most = max(most, _MAX_LOOKED_UP)
            if all(graph.nodes[j].op == "const" for j in others) and node.numel <= most:
                static.add(i)
                size[i] = origin
    return static


def _widened(graph: Graph, users: list[list[int]], node: int) -> bool:
    """Whether it is a parameter in a wider type, and no product reads it.

    Each reader widens it, exactly, at no more cost than reading a wide copy, which nobody has to
    keep and to compare with the parameter.
    """
    nodes = graph.nodes
    at, wide = nodes[node].inputs[0], nodes[node].dtype
    if nodes[node].op != "cast" or wide not in FLOATS or nodes[at].dtype not in FLOATS:
        return False
    if ITEMSIZE[nodes[at].dtype] >= ITEMSIZE[wide]:
        return False
    while nodes[at].kind is OpKind.VIEW:
        at = nodes[at].inputs[0]
    stack = list(users[node])
    while stack:
        user = nodes[u := stack.pop()]
        if user.kind in (OpKind.CONTRACT, OpKind.WINDOW):
            return False
        if user.kind is OpKind.VIEW:
            stack.extend(users[u])
    return nodes[at].op == "input"


def _leaves(graph: Graph, users: list[list[int]], static: set[int], node: int) -> bool:
    """Whether a reader outside the static part sees ``node``, directly or through static views."""
    for u in users[node]:
        if u not in static:
            return True
        if graph.nodes[u].kind is OpKind.VIEW and (
            u in graph.outputs or _leaves(graph, users, static, u)
        ):
            return True
    return False


def _extract(graph: Graph, wanted: list[int]) -> tuple[Graph, tuple[int, ...]]:
    needed: set[int] = set()
    stack = list(wanted)
    while stack:
        i = stack.pop()
        if i not in needed:
            needed.add(i)
            stack.extend(graph.nodes[i].inputs)
    builder = GraphBuilder()
    new: dict[int, int] = {}
    sources: list[int] = []
    for i in sorted(needed):
        node = graph.nodes[i]
        if node.op == "input":
            new[i] = builder.input(len(sources), node.shape, node.dtype, static=True)
            sources.append(node.attr("index"))
        else:
            new[i] = builder.again(node, (new[j] for j in node.inputs))
    return builder.finish([new[i] for i in wanted]), tuple(sources)
