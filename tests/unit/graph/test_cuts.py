"""Graphs cut otherwise than rules say: the same results, whatever the sites."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.graph.attention_graphs import Case, attention
from tests.unit.graph.random_graphs import assert_close, graphs, inputs_for, run_fused
from torch_pruner.families import sketches_for
from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.cuts import (
    AGAIN,
    APART,
    JOINED,
    MOST,
    NO_CUTS,
    ONCE,
    PARTS,
    PLANES,
    Site,
    from_text,
    of_kind,
    to_text,
)
from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.hoist import hoist_static
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.layout import channels_last, identity
from torch_pruner.graph.reference import evaluate
from torch_pruner.graph.side_by_side import joinable, side_by_side
from torch_pruner.graph.taken_apart import separable, taken_apart
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

_MANY = settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def kinds(graph: Graph) -> set[str]:
    return {site.kind for site in fuse(graph).sites}


@_MANY
@given(st.data())
def test_any_cut_computes_the_graph(data: st.DataObject) -> None:
    graph = data.draw(graphs(moves=14))
    sites = fuse(graph).sites
    chosen = frozenset(s for s in sites if data.draw(st.booleans()))
    cut = fuse(graph, cuts=chosen)
    arrays = inputs_for(graph)
    assert_close(run_fused(cut, arrays), evaluate(graph, arrays), 1e-4)
    for kernel in cut.kernels:
        assert sketches_for(Task("kernel", kernel.spec, TargetSpec.detect(2), 2))


@_MANY
@given(graphs(moves=14))
def test_sites_that_a_graph_does_not_have_are_nothing(graph: Graph) -> None:
    usual = fuse(graph)
    assert usual.sites == tuple(dict.fromkeys(usual.sites))
    none = frozenset(Site(kind, len(graph.nodes) + 7) for kind in (PARTS, APART, ONCE, PLANES))
    assert fuse(graph, cuts=none) == usual


def shared(readers: int, operators: int) -> Graph:
    """Something of so many operators that others read, each for a result of its own."""
    b = GraphBuilder()
    x = b.input(0, (8, 32), "float32")
    for k in range(operators):
        x = b.pointwise("add" if k % 2 else "mul", x, b.input(1 + k, (8, 32), "float32"))
    return b.finish([b.pointwise("relu" if k else "neg", x) for k in range(readers)])


@pytest.mark.parametrize(("operators", "kind"), [(2, ONCE), (6, AGAIN)])
def test_what_several_read_is_computed_once_or_again(operators: int, kind: str) -> None:
    graph = shared(2, operators)
    usual = fuse(graph)
    (site,) = usual.sites
    assert site.kind == kind
    other = fuse(graph, cuts=frozenset([site]))
    assert (site.node in other.orders) is (kind == ONCE)
    assert (site.node in usual.orders) is (kind == AGAIN)
    assert not kinds(shared(1, operators)), "where one reads it there is nothing to decide"


def layer(bias: bool) -> Graph:
    b = GraphBuilder()
    x, w = b.input(0, (8, 32), "float32"), b.input(1, (32, 16), "float32", static=True)
    y = b.matmul(x, w)
    return b.finish([b.pointwise("relu", y) if bias else y])


def test_what_follows_a_product_is_a_kernel_of_its_own() -> None:
    graph = layer(True)
    (site,) = fuse(graph).sites
    assert site.kind == APART
    assert [len(fuse(graph, cuts=c).kernels) for c in (NO_CUTS, frozenset([site]))] == [1, 2]
    assert not kinds(layer(False))


def test_attention_in_parts() -> None:
    graph = attention(Case(queries=32, keys=32))
    (site,) = (s for s in fuse(graph).sites if s.kind == PARTS)
    one, parts = fuse(graph).kernels, fuse(graph, cuts=frozenset([site])).kernels
    assert [attention_of(k.spec) is not None for k in one].count(True) == 1
    assert not any(attention_of(k.spec) for k in parts)
    assert len(parts) > len(one)


def test_convolutions_in_planes() -> None:
    b = GraphBuilder()
    x = b.input(0, (1, 4, 8, 8), "float32")
    for k in range(3):
        w = b.input(1 + k, (4, 4, 3, 3), "float32", static=True)
        x = b.append(
            "conv", (x, w), (1, 4, 8, 8), "float32", stride=(1, 1), lo=(1, 1), hi=(1, 1),
            dilation=(1, 1), groups=1,
        )  # fmt: skip
    graph = b.finish([x])
    usual = fuse(graph)
    sites = [s for s in usual.sites if s.kind == PLANES]
    assert len(sites) == 2, "the last one lies as callers want it"
    assert usual.orders[sites[0].node] == channels_last(4)
    other = fuse(graph, cuts=frozenset(sites[:1]))
    assert other.orders[sites[0].node] == identity(4)
    assert other.orders[sites[1].node] == channels_last(4)
    arrays = inputs_for(graph)
    assert_close(run_fused(other, arrays), evaluate(graph, arrays), 1e-4)


def heads(
    *columns: int,
    bias: tuple[bool, ...] = (),
    static: bool = True,
    read: bool = False,
    apart: bool = False,
) -> Graph:
    """Products of one operand with several matrices, to each of which a row may be added."""
    b = GraphBuilder()
    x, index = b.input(0, (6, 8), "float32"), 1
    found = []
    for k, width in enumerate(columns):
        w = b.permute(b.input(index, (width, 8), "float32", static=static), (1, 0))
        y, index = b.matmul(x, w), index + 1
        if bias and bias[k]:
            row = b.input(index, (width,), "float32", static=True)
            y = b.reshape(y, (2, 3, width)) if apart else y
            z, index = b.pointwise("add", y, row), index + 1
            found += [y, z] if read else [z]
        else:
            found.append(b.pointwise("relu", y))
    return b.finish(found)


@pytest.mark.parametrize("bias", [(), (True, True, True), (True, False, True)])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_products_side_by_side(bias: tuple[bool, ...], read: bool, apart: bool) -> None:
    graph = heads(4, 3, 5, bias=bias, read=read, apart=apart)
    (group,) = joinable(graph)
    assert len(group) == 3
    made = side_by_side(graph, [group[0]])
    products = [n for n in made.nodes if n.op == "matmul"]
    assert [n.shape for n in products] == [(6, 12)]
    hoisted = hoist_static(made)
    assert hoisted.prepare is not None
    assert not any(n.op == "cat" for n in hoisted.graph.nodes), "constants are joined once"
    sums = [n for n in made.nodes if n.op == "add" and n.shape == (6, 12)]
    assert bool(sums) is (bias == (True, True, True) and not read)
    arrays = inputs_for(graph)
    for got, wanted in zip(evaluate(made, arrays), evaluate(graph, arrays), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("graph", [heads(4), heads(4, 3, static=False), layer(True)])
def test_what_is_not_joined(graph: Graph) -> None:
    assert joinable(graph) == []
    assert side_by_side(graph, range(len(graph.nodes))) == graph


def test_groups_that_nobody_asked_for_stay() -> None:
    graph = heads(4, 3)
    assert side_by_side(graph, []) is graph


def parts(way: str, bias: bool = True, whole: bool = False) -> Graph:
    """A product of 24 columns whose result is taken apart as networks do it."""
    b = GraphBuilder()
    x = b.input(0, (6, 8), "float32")
    y = b.matmul(x, b.permute(b.input(1, (24, 8), "float32", static=True), (1, 0)))
    if way == "rows":
        y = b.reshape(y, (2, 3, 24))
    if bias:
        y = b.pointwise("add", y, b.input(2, (24,), "float32", static=True))
    found = []
    if way == "heads":  # (batch, position, part, head, element), parts first
        y = b.permute(b.reshape(y, (2, 3, 3, 2, 4)), (2, 0, 3, 1, 4))
        found = [b.slice(y, (p, 0, 0, 0, 0), (1, 2, 2, 3, 4)) for p in range(3)]
    elif way == "rows":
        found = [b.slice(y, (0, 0, at), (2, 3, n)) for at, n in ((0, 12), (12, 8), (20, 4))]
    elif way == "gate":
        found = [b.slice(y, (0, 12 * p), (6, 12)) for p in range(2)]
    elif way == "some":
        found = [b.slice(y, (0, 4), (6, 4)), b.slice(y, (0, 20), (6, 4))]
    elif way == "across":  # elements of a head: columns that do not lie together
        y = b.reshape(y, (6, 3, 8))
        found = [b.slice(y, (0, 0, 4 * p), (6, 3, 4)) for p in range(2)]
    elif way == "every":
        found = [b.slice(y, (0, p), (6, 12), (1, 2)) for p in range(2)]
    elif way == "positions":
        found = [b.slice(y, (3 * p, 0), (3, 24)) for p in range(2)]
    results = [b.pointwise("relu" if k else "neg", f) for k, f in enumerate(found)]
    return b.finish([*results, y] if whole else results)


@pytest.mark.parametrize("way", ["heads", "rows", "gate", "some"])
@pytest.mark.parametrize("bias", [False, True])
def test_products_part_by_part(way: str, bias: bool) -> None:
    graph = parts(way, bias)
    (product,) = separable(graph)
    made = taken_apart(graph, [product])
    products = [n for n in made.nodes if n.op == "matmul"]
    columns = {"heads": [8, 8, 8], "rows": [12, 8, 4], "gate": [12, 12], "some": [4, 4]}[way]
    assert [n.shape for n in products] == [(6, n) for n in columns]
    assert not any(n.shape[-1:] == (24,) for n in made.nodes if n.op in ("add", "reshape"))
    arrays = inputs_for(graph)
    for got, wanted in zip(evaluate(made, arrays), evaluate(graph, arrays), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert len(fuse(made).kernels) == len(products), "what follows a part is in its kernel"
    assert taken_apart(graph, []) is graph


@pytest.mark.parametrize(
    "graph",
    [parts("across"), parts("every"), parts("positions"), parts("gate", whole=True), layer(True)],
)
def test_what_is_not_taken_apart(graph: Graph) -> None:
    assert separable(graph) == []
    assert taken_apart(graph, range(len(graph.nodes))) == graph


def test_what_was_joined_can_be_taken_apart() -> None:
    graph = heads(4, 3, 5, bias=(True, True, True))
    joined = side_by_side(graph, [joinable(graph)[0][0]])
    assert len(separable(joined)) == 1


def test_text_of_cuts() -> None:
    cuts = frozenset([Site(JOINED, 3), Site(PLANES, 12), Site(PLANES, 2)])
    assert from_text(to_text(cuts)) == cuts
    assert to_text(frozenset(sorted(cuts))) == to_text(cuts)
    assert of_kind(cuts, PLANES) == {2, 12}
    assert from_text(to_text(NO_CUTS)) == NO_CUTS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"), ("{}", "not a list"), ("[1]", "not a site"),
        ('[["joined"]]', "not a site"), ('[["other", 1]]', "not a site"),
        ('[["joined", -1]]', "not a node"), ('[["joined", 1.5]]', "not a node"),
        ('[["joined", true]]', "not a node"), ("[[[], 1]]", "not a site"),
        (str([["joined", 1]] * (MOST + 1)).replace("'", '"'), "not a list"),
    ],
)  # fmt: skip
def test_other_texts_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_text(text)


@pytest.mark.parametrize("graph", [parts("gate"), heads(4, 3)])
def test_products_of_graphs_that_count_stay(graph: Graph) -> None:
    b = GraphBuilder()
    for node in graph.nodes:
        b.again(node, node.inputs)
    b.append("input", (), (1,), "int64", index=99, static=False, counts=True)
    counted = Graph(tuple(b.nodes), graph.outputs)
    assert any(node.is_count for node in counted.nodes)
    assert separable(counted) == joinable(counted) == []
