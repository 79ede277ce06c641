"""Operands of reductions that lie across are turned first, into buffers."""

from __future__ import annotations

import pytest
from hypothesis import given as drawn
from hypothesis import settings

from tests.unit.graph.random_graphs import assert_close, graphs, inputs_for, run_fused
from torch_pruner.graph import _turned
from torch_pruner.graph.cuts import TURNED, Site
from torch_pruner.graph.fuse import FusedGraph, fuse
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate


def gradient(batch: int, rows: int, columns: int, *, near: int = 2) -> Graph:
    """Sums over rows of a value that lies across times ``near`` others, as a layer norm's gradient
    behind a product of the turned value has them."""
    b = GraphBuilder()
    across = b.input(0, (batch * columns, rows), "float32")
    product = b.permute(b.reshape(across, (batch, columns, rows)), (0, 2, 1))
    total = product
    for k in range(near):
        other = b.input(k + 1, (batch, rows, columns), "float32")
        total = b.pointwise("mul", total, other)
    return b.finish([b.reduce("sum", total, (0, 1)), b.reduce("sum", product, (0, 1))])


def _kinds(fused: FusedGraph) -> list[set[str]]:
    return [{n.op for n in kernel.spec.nodes if n.op != "input"} for kernel in fused.kernels]


def _agrees(fused: FusedGraph, graph: Graph) -> None:
    given = inputs_for(graph)
    assert_close(run_fused(fused, given), evaluate(graph, given), 1e-3)


@settings(max_examples=150, deadline=None, derandomize=True)
@drawn(graphs(moves=14))
def test_kernels_compute_the_graph_however_little_is_turned(graph: Graph) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_turned, "_WORTH_TURNING", 2)
        _agrees(fuse(graph), graph)


def test_what_lies_across_is_turned_in_a_kernel_of_its_own() -> None:
    graph = gradient(2, 100, 120)
    fused = fuse(graph)
    assert {"permute", "reshape"} in _kinds(fused)
    sums = next(k for k in fused.kernels if any(n.op == "sum" for n in k.spec.nodes))
    assert not any(n.op == "permute" for n in sums.spec.nodes)
    _agrees(fused, graph)


def test_channels_last_decides_where_more_lies_so() -> None:
    """One operand and a result in planes, beside two that lie channels last."""
    b = GraphBuilder()
    shape = (2, 48, 16, 16)
    planes = b.input(0, shape, "float32")
    last = [b.permute(b.input(k, (2, 16, 16, 48), "float32"), (0, 3, 1, 2)) for k in (1, 2)]
    product = b.pointwise("mul", planes, b.pointwise("mul", *last))
    graph = b.finish([b.reduce("sum", product, (0, 2, 3))])
    fused = fuse(graph)
    _agrees(fused, graph)
    assert len(fused.kernels) == 1  # an input is read as it lies: there is no view to turn


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        (gradient(2, 20, 30), "small"),
        (gradient(2, 100, 120, near=0), "alone"),
    ],
    ids=["small", "alone"],
)
def test_other_reads_stay(graph: Graph, why: str) -> None:
    fused = fuse(graph)
    assert len(fused.kernels) == 1, why
    _agrees(fused, graph)


def test_it_is_a_site_that_can_be_cut_otherwise() -> None:
    graph = gradient(2, 100, 120)
    (site,) = [s for s in fuse(graph).sites if s.kind == TURNED]
    fused = fuse(graph, cuts=frozenset([Site(TURNED, site.node)]))
    assert len(fused.kernels) == 1
    _agrees(fused, graph)
