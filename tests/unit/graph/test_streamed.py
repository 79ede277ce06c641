"""Which kernels of a program read more weights, each once, than a cache holds."""

from __future__ import annotations

import pytest

from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.streamed import past_caches


def two(rows: int, *, shared: bool = False, static: bool = True) -> Graph:
    """Two products of 4096 bytes of weights, which may be the same."""
    b = GraphBuilder()
    x = b.input(0, (rows, 32), "float32")
    first = b.input(1, (32, 32), "float32", static=static)
    second = first if shared else b.input(2, (32, 32), "float32", static=static)
    h = b.pointwise("exp", b.matmul(x, b.permute(first, (1, 0))))
    return b.finish([b.pointwise("relu", b.matmul(h, b.permute(second, (1, 0))))])


def names(graph: Graph, cache_bytes: int) -> list[int]:
    fused = fuse(graph)
    numbered = [str(i) for i in range(len(fused.kernels))]
    return sorted(int(name) for name in past_caches(fused, numbered, cache_bytes))


def test_weights_count_together() -> None:
    assert names(two(1), 8191) == [0, 1]
    assert names(two(1), 8192) == []


def test_weights_that_are_read_twice_count_once() -> None:
    assert names(two(1, shared=True), 4096) == []
    assert names(two(1, shared=True), 4095) == [0, 1]


@pytest.mark.parametrize("graph", [two(17), two(1, static=False)], ids=["many rows", "no weights"])
def test_what_else_is_read_does_not_count(graph: Graph) -> None:
    assert names(graph, 0) == []
