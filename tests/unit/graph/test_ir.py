"""Graphs as values: JSON both ways, refusal of what is not a graph, digests, sharing."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings

from tests.unit.graph.random_graphs import graphs, random_graph
from torch_pruner.graph.ir import Graph, GraphBuilder, broadcast_shapes, const_value


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs())
def test_json_round_trip(graph):
    again = Graph.from_json(json.loads(json.dumps(graph.to_json())))
    assert again == graph
    assert again.digest() == graph.digest()


GOOD = [["input", [], [2, 3], "float32", {"index": 0, "static": False}]]


@pytest.mark.parametrize(
    "data",
    [
        None,
        7,
        [],
        [GOOD],
        [GOOD, [0], 1],
        [GOOD, None],
        [GOOD, ["first"]],
        [[["input", [], [2, 3], "float32"]], [0]],
        [[["sine", [], [2], "float32", {}]], [0]],
        [[["exp", [0], [2], "float32", {}]], [0]],
        [[["exp", [-1], [2], "float32", {}]], [0]],
        [[["input", [], [-2], "float32", {}]], [0]],
        [[["input", [], ["two"], "float32", {}]], [0]],
        [[["input", [], [2], "complex64", {}]], [0]],
        [[["input", [], [2], "float32", {"index": {}}]], [0]],
        [[["input", [], [2], "float32", [1]]], [0]],
        [[["input", 3, [2], "float32", {}]], [0]],
    ],
    ids=lambda data: json.dumps(data)[:40],
)
def test_malformed_json_is_a_value_error(data):
    with pytest.raises(ValueError, match=r"."):
        Graph.from_json(data)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_constants_that_json_cannot_say(value):
    b = GraphBuilder()
    graph = b.finish([b.const(value, "float32")])
    text = json.dumps(graph.to_json(), allow_nan=False)
    again = const_value(Graph.from_json(json.loads(text)).nodes[0])
    assert again == value or (math.isnan(again) and math.isnan(value))


DIGESTS = """
from tests.unit.graph.random_graphs import random_graph
print([random_graph(seed).digest() for seed in range(20)])
"""


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_digests_agree_across_processes(hash_seed):
    expected = [random_graph(seed).digest() for seed in range(20)]
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS],
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(expected)


def test_digest_tells_graphs_apart():
    def digest(shape: tuple[int, ...], dtype: str, op: str) -> str:
        b = GraphBuilder()
        return b.finish([b.pointwise(op, b.input(0, shape, dtype))]).digest()

    found = [digest(s, d, o) for s in ((2, 3), (3, 2)) for d in ("float32", "float16")
             for o in ("exp", "log")]  # fmt: skip
    assert len(set(found)) == len(found)


def test_equal_nodes_are_shared():
    b = GraphBuilder()
    x = b.input(0, (2, 3), "float32")
    assert b.pointwise("exp", x) == b.pointwise("exp", x)
    assert b.const(1, "float32") != b.const(1, "int32")


def test_finish_drops_dead_nodes_and_keeps_inputs():
    b = GraphBuilder()
    x, unused = b.input(1, (2,), "float32"), b.input(0, (3,), "float32")
    b.pointwise("exp", unused)
    graph = b.finish([b.pointwise("log", x)])
    assert [n.op for n in graph.nodes] == ["input", "input", "log"]
    assert [graph.nodes[i].attr("index") for i in graph.inputs] == [0, 1]


def test_users_count_a_reader_once():
    b = GraphBuilder()
    x = b.input(0, (2,), "float32")
    graph = b.finish([b.pointwise("mul", x, x), b.pointwise("exp", x)])
    assert graph.users() == [[1, 2], [], []]


def test_conveniences_that_do_nothing():
    b = GraphBuilder()
    x = b.input(0, (2, 3), "float32")
    assert b.cast(x, "float32") == x
    assert b.reshape(b.reshape(x, (6,)), (2, 3)) == x
    assert b.permute(b.permute(x, (1, 0)), (1, 0)) == x
    assert b.broadcast(x, (2, 3)) == x
    assert b.slice(x, (0, 0), (2, 3)) == x
    assert b.reduce("sum", x, ()) == x


def test_keepdim():
    b = GraphBuilder()
    x = b.input(0, (2, 3, 4), "float32")
    assert b.shape(b.reduce("sum", x, (1, -1), keepdim=True)) == (2, 1, 1)
    assert b.shape(b.reduce("sum", x, (1, -1))) == (2,)


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        ((), (3,), (3,)),
        ((1, 3), (2, 1), (2, 3)),
        ((0,), (1,), (0,)),
        ((4, 1, 2), (3, 1), (4, 3, 2)),
    ],
)
def test_broadcast_shapes(a, b, both):
    assert broadcast_shapes(a, b) == both
    assert broadcast_shapes(b, a) == both


@pytest.mark.parametrize(("a", "b"), [((2,), (3,)), ((2, 3), (2,)), ((0,), (2,))])
def test_shapes_that_do_not_broadcast(a, b):
    with pytest.raises(ValueError, match="do not broadcast"):
        broadcast_shapes(a, b)
