"""Attention of few queries: what heads share, what rules keys out, and which is one kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.graph.attention_graphs import Case, attention, narrow
from tests.unit.graph.random_graphs import assert_close, inputs_for, run_fused
from torch_pruner.cards import CARDS
from torch_pruner.compiler.one_kernel import is_cheaper_as_one
from torch_pruner.families import sketches_for
from torch_pruner.families.decode_attention.form import few_queries_of, same_for_heads
from torch_pruner.graph.attention import alone, any_attention, attention_of
from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.narrow import keep_narrow
from torch_pruner.graph.reference import evaluate
from torch_pruner.graph.strided import offsets, strided
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

# Caches are not those of the machine that runs the tests: with larger ones other cuts are cheaper.
TARGET = replace(
    TargetSpec.from_dict({"kind": "llvm", "mcpu": "icelake-server"}, 2),
    cores=2, l1_bytes=48 << 10, l2_bytes=512 << 10, l3_bytes=32 << 20,
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "together"),
    [
        (Case(queries=1), 1),
        (Case(queries=1, kv=2), 2),
        (Case(queries=3, kv=1, batch=2), 4),
        (Case(queries=1, heads=14, kv=2, batch=2, flat=True), 7),
    ],
)
def test_heads_that_share_keys_are_together(case: Case, together: int) -> None:
    few = few_queries_of(attention(case))
    assert few is not None
    assert (few.together, few.rows) == (together, together * case.queries)
    assert few.groups * together == case.batch * case.heads


def test_sixteen_queries_are_many() -> None:
    assert few_queries_of(attention(Case(queries=16))) is None


@pytest.mark.parametrize(
    ("mask", "rules", "alike"),
    [("", 0, True), ("add", 1, True), ("row", 1, True), ("heads", 1, False), ("bool", 1, True)],
)
def test_masks_rule_keys_out(mask: str, rules: int, alike: bool) -> None:
    spec = attention(Case(queries=1, mask=mask))
    few = few_queries_of(spec)
    assert few is not None
    assert len(few.ruling) == rules
    assert all(same_for_heads(spec, node) == alike for node in few.ruling)


def test_offsets_are_where_strides_say() -> None:
    b = GraphBuilder()
    x = b.slice(b.input(0, (2, 5, 24), "float32"), (0, 0, 12), (2, 5, 12))
    x = b.permute(b.reshape(x, (2, 5, 3, 4)), (0, 2, 1, 3))
    graph = b.finish([b.append("broadcast", (x,), (6, 2, 3, 5, 4), "float32")])
    at = graph.outputs[0]
    place = strided(graph, at)
    assert place is not None
    index = np.indices(graph.nodes[at].shape)
    expected = place.offset + sum(i * s for i, s in zip(index, place.strides, strict=True))
    np.testing.assert_array_equal(offsets(graph, at, list(index)), expected)


def test_it_is_a_graph_of_its_own() -> None:
    graph = attention(Case(queries=1, kv=2, mask="bool", guard=True))
    found = attention_of(graph)
    assert found is not None
    small = alone(graph, found.inner, (found.out,))
    arrays = inputs_for(graph)
    assert_close(evaluate(small, arrays), evaluate(graph, arrays), 1e-6)


def _kernels(graph: Graph) -> int:
    return len(fuse(graph, few_queries=is_cheaper_as_one(TARGET, 2)).kernels)


def test_the_cheaper_cut_is_made() -> None:
    """Keys that eight heads share are read once, which takes neighbours along the depth."""
    shared = Case(queries=1, heads=32, kv=4, keys=4096, depth=64, width=64, mask="bool")
    assert _kernels(attention(shared)) == 1
    b = GraphBuilder()
    shapes = ((8, 1, 64), (8, 64, 8192), (8, 8192, 64))
    q, k, v = (b.input(i, shape, "float32") for i, shape in enumerate(shapes))
    s = b.matmul(q, k)
    powers = b.pointwise("exp", b.pointwise("sub", s, b.reduce("max", s, (2,), keepdim=True)))
    total = b.reduce("sum", powers, (2,), keepdim=True)
    turned = b.finish([b.matmul(b.pointwise("div", powers, total), v)])
    assert len(fuse(turned, few_queries=any_attention).kernels) == 1
    assert _kernels(turned) == 3


def test_one_launch_is_cheaper_than_three_on_a_card() -> None:
    one = Case(queries=1, heads=32, kv=8, keys=4096, depth=64, width=64, dtype="float16")
    takes = is_cheaper_as_one(TargetSpec.cuda(CARDS["h200"]), 1)
    assert len(fuse(attention(one), few_queries=takes).kernels) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_a_narrow_cache_is_not_widened_in_memory(dtype: str) -> None:
    graph = narrow(dtype)
    kept = keep_narrow(graph)
    assert not any(n.op == "cast" for n in kept.nodes)
    fused = fuse(kept, few_queries=any_attention)
    assert len(fused.kernels) == 1
    found = attention_of(fused.kernels[0].spec)
    assert found is not None
    assert (found.factor is not None) == (dtype == "int8")
    assert few_queries_of(fused.kernels[0].spec) is not None
    arrays = inputs_for(graph)
    assert_close(run_fused(fused, arrays), evaluate(graph, arrays), 1e-5)


def test_scaled_weights_are_for_the_kernel_of_few_queries_alone() -> None:
    spec = fuse(keep_narrow(narrow("int8")), few_queries=any_attention).kernels[0].spec
    names = [s.name for s in sketches_for(Task("decode", spec, TARGET, 2))]
    assert "decode_attention" in names
    assert "attention" not in names


def test_many_queries_read_a_cache_widened() -> None:
    graph = narrow("bfloat16", queries=32)
    assert keep_narrow(graph).digest() == graph.digest()


@pytest.mark.parametrize("case", [Case(width=2, depth=2, queries=256, keys=256), Case(width=12)])
def test_narrow_heads_are_one_kernel(case: Case) -> None:
    assert _kernels(attention(case)) == 1
