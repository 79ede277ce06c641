"""Keys by mutation: a change that changes results changes the key; building again does not.

The key of a program is made of the fused graph and its kernels, as the driver makes it; a collision
would run another model's code.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tests.unit.graph.random_graphs import inputs_for, random_graph
from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.hoist import hoist_static
from torch_pruner.graph.ir import Graph, GraphBuilder, Node
from torch_pruner.graph.reference import evaluate
from torch_pruner.graph.simplify import simplify

if TYPE_CHECKING:
    from collections.abc import Iterator

MUTATIONS = 1000
REBUILDS = 100
UNARY = ("neg", "abs", "relu", "tanh", "sigmoid", "erf", "sin", "cos", "floor", "ceil")
BINARY = ("add", "sub", "mul", "maximum", "minimum")
REDUCTIONS = ("sum", "max", "min")


def key(graph: Graph) -> str:
    """All that the keys of a program and of its kernels are made of."""
    hoisted = hoist_static(simplify(graph))
    fused = fuse(hoisted.graph)
    orders = sorted((i, list(o)) for i, o in fused.orders.items())
    prepare = hoisted.prepare.to_json() if hoisted.prepare is not None else None
    kernels = [k.spec.digest() for k in fused.kernels]
    parts = [fused.graph.to_json(), orders, kernels, prepare, hoisted.sources]
    return json.dumps(parts, sort_keys=True)


def changed(node: Node, rng: np.random.Generator) -> Node | None:
    """``node`` with one thing about it different, its shape and dtype as they were."""
    for family in (UNARY, BINARY, REDUCTIONS):
        if node.op in family and node.dtype.startswith("float"):
            others = [op for op in family if op != node.op]
            if len(node.inputs) == 2 and rng.integers(2):
                return replace(node, inputs=node.inputs[::-1])
            return replace(node, op=others[rng.integers(len(others))])
    attrs = dict(node.attrs)
    if node.op == "const" and isinstance(attrs["value"], float):
        attrs["value"] = attrs["value"] + 0.25
    elif node.op == "flip" and len(node.shape) > 1:
        attrs["dims"] = (1,)
    elif node.op == "slice" and any(attrs["starts"]):
        attrs["starts"] = tuple(max(s - 1, 0) for s in attrs["starts"])
    elif node.op == "pad" and isinstance(attrs["value"], float):
        attrs["value"] = attrs["value"] + 1.0
    elif node.op == "cat" and len(node.inputs) > 1:
        return replace(node, inputs=node.inputs[::-1])
    elif node.op == "argmax":
        return replace(node, op="argmin")
    else:
        return None
    return replace(node, attrs=tuple(sorted(attrs.items())))


def rebuilt(graph: Graph, at: int, node: Node) -> Graph | None:
    """``graph`` with another node at one place; None where that is not well formed."""
    builder = GraphBuilder()
    new: list[int] = []
    for i, old in enumerate(graph.nodes):
        n = node if i == at else old
        try:
            new.append(
                builder.append(n.op, [new[j] for j in n.inputs], n.shape, n.dtype, **dict(n.attrs))
            )
        except ValueError:
            return None
    return builder.finish([new[o] for o in graph.outputs])


def same_results(a: Graph, b: Graph) -> bool:
    for seed in range(2):
        try:
            left, right = evaluate(a, inputs_for(a, seed)), evaluate(b, inputs_for(b, seed))
        except (ValueError, IndexError):  # operands that no longer fit
            return True
        for x, y in zip(left, right, strict=True):
            if x.shape != y.shape or not np.array_equal(x, y, equal_nan=x.dtype.kind == "f"):
                return False
    return True


def mutants() -> Iterator[tuple[Graph, Graph]]:
    """Graphs with mutants that compute something else."""
    rng = np.random.default_rng(0)
    seed = 0
    while True:
        graph = random_graph(seed, moves=8, numel=256)
        seed += 1
        for at in rng.permutation(len(graph.nodes)):
            node = changed(graph.nodes[at], rng)
            other = rebuilt(graph, int(at), node) if node is not None else None
            if other is not None and not same_results(graph, other):
                yield graph, other


def test_no_mutant_has_the_key_of_its_original() -> None:
    with np.errstate(all="ignore"):
        found = mutants()
        for _ in range(MUTATIONS):
            graph, other = next(found)
            assert key(graph) != key(other), (graph.to_json(), other.to_json())


def test_shapes_and_dtypes_are_in_the_key() -> None:
    """Another extent or another type of an input, which results alone might not show."""
    seen = set()
    for shape in ((2, 3), (3, 2), (6,), (2, 3, 1)):
        for dtype in ("float32", "float64", "bfloat16", "float16"):
            for static in (False, True):
                b = GraphBuilder()
                x = b.input(0, shape, dtype, static=static)
                y = b.input(1, shape, dtype)
                seen.add(key(b.finish([b.pointwise("add", b.pointwise("exp", x), y)])))
    assert len(seen) == 4 * 4 * 2


def test_building_again_gives_the_same_key() -> None:
    for seed in range(REBUILDS):
        graph = random_graph(seed, moves=8, numel=256)
        text = json.dumps(graph.to_json(), allow_nan=False)
        copy = rebuilt(graph, -1, graph.nodes[0])
        assert copy is not None
        assert key(graph) == key(Graph.from_json(json.loads(text))) == key(copy)
        assert key(graph) == key(random_graph(seed, moves=8, numel=256))
