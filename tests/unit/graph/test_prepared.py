"""What is computed ahead, written out for what changes, and bytes with a scale for every group."""

from __future__ import annotations

import numpy as np
import pytest

from torch_pruner.graph import nibbles
from torch_pruner.graph.int4 import keep_groups
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.prepared import ordinary
from torch_pruner.graph.reference import evaluate

N, K = 80, 64


def inputs_for(graph: Graph) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    found = []
    for i in graph.inputs:
        node = graph.nodes[i]
        if node.dtype == "float32":
            found.append(random.standard_normal(node.shape).astype(np.float32))
        else:
            limits = np.iinfo(node.dtype)
            whole = random.integers(limits.min, limits.max, node.shape, endpoint=True)
            found.append(whole.astype(node.dtype))
    return found


def from_torch(static: bool, block: int, offsets: bool = True) -> Graph:
    b = GraphBuilder()
    given = b.input(0, (N, K // 2), "uint8", static=static)
    both = b.input(1, (K // 32, N, 2), "float32", static=static)
    words = b.append("torch_words", (given,), (K // 8, N), "int32", block=block)
    planes = [b.append("plane", (both,), (K // 32, N), "float32", at=i) for i in range(1 + offsets)]
    x = b.input(2, (3, K), "float32")
    weights = b.append("group_floats", (words, *planes), (K, N), "float32", bits=4, group=32)
    return b.finish([b.matmul(x, weights)])


def of_bytes(
    depth: int, group: int, *, static: bool = True, zero: bool = True, narrow: bool = False
) -> Graph:
    """As torchao has them: (n, groups, group), scales and zeros (n, groups, 1)."""
    b, groups = GraphBuilder(), depth // group
    dtype = "bfloat16" if narrow else "float32"
    q = b.input(0, (N, depth), "int8", static=static)
    scale = b.input(1, (N, groups), "float32", static=static)
    zeros = b.input(2, (N, groups), "int8", static=static)
    x = b.input(3, (2, depth), "float32")
    value = b.cast(b.reshape(q, (N, groups, group)), "float32")
    if zero:
        value = b.pointwise("sub", value, b.cast(b.reshape(zeros, (N, groups, 1)), "float32"))
    value = b.cast(b.cast(value, dtype), "float32")
    value = b.pointwise("mul", value, b.reshape(scale, (N, groups, 1)))
    return b.finish([b.matmul(x, b.permute(b.reshape(value, (N, depth)), (1, 0)))])


@pytest.mark.parametrize("block", [64, 32, 0])
def test_what_changes_is_written_out(block: int) -> None:
    fixed, changing = from_torch(True, block), from_torch(False, block)
    assert ordinary(fixed) == fixed
    written = ordinary(changing)
    assert all(n.kind is not OpKind.PREPARED for n in written.nodes)
    arrays = inputs_for(changing)
    for got, want in zip(evaluate(written, arrays), evaluate(changing, arrays), strict=True):
        np.testing.assert_array_equal(got, want)


def test_words_of_bytes_are_written_out() -> None:
    b = GraphBuilder()
    words = b.append("byte_words", (b.input(0, (10, N), "int8"),), (3, N), "int32")
    graph = b.finish([words])
    arrays = inputs_for(graph)
    np.testing.assert_array_equal(*evaluate(ordinary(graph), arrays), *evaluate(graph, arrays))
    np.testing.assert_array_equal(nibbles.unpacked(*evaluate(graph, arrays), 10, 8), arrays[0])


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize(("depth", "group"), [(96, 32), (64, 64), (40, 20)])
def test_bytes_with_a_scale_for_every_group_stay_bytes(depth: int, group: int, zero: bool) -> None:
    graph = of_bytes(depth, group, zero=zero)
    kept = keep_groups(graph)
    (product,) = [n for n in kept.nodes if n.op == "matmul_grouped"]
    assert (product.attr("bits"), product.attr("group"), len(product.inputs)) == (
        8,
        group,
        3 + zero,
    )
    arrays = inputs_for(graph)
    (got,), (want,) = evaluate(kept, arrays), evaluate(graph, arrays)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    narrow = keep_groups(of_bytes(depth, group, narrow=True))
    assert any(n.op == "matmul_grouped" for n in narrow.nodes)


def test_other_products_stay() -> None:
    for graph in (of_bytes(64, 32, static=False), of_bytes(66, 33)):
        assert keep_groups(graph) == graph
