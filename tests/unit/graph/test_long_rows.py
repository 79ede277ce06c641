"""Long reductions to few numbers have two steps, and give what they gave."""

from __future__ import annotations

import numpy as np
import pytest

from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.long_rows import LONG, in_parts
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.reference import evaluate


def reduction(op, shape, axes, dtype="float32", result=None):
    b = GraphBuilder()
    x = b.append("input", (), shape, dtype, index=0)
    return b.finish([b.reduce(op, x, axes, dtype=result)])


def steps(graph) -> int:
    return sum(n.kind is OpKind.REDUCE for n in graph.nodes)


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize(
    ("shape", "axes"), [((300, 256), (0, 1)), ((1, 3, 256, 256), (1, 2, 3)), ((2, 65536), (1,))]
)
def test_the_result_is_what_it_was(op, shape, axes) -> None:
    graph = reduction(op, shape, axes)
    two = in_parts(graph, 4)
    assert steps(two) == 2
    x = np.random.default_rng(0).uniform(0.999, 1.001, shape).astype(np.float32)
    (before,), (after,) = evaluate(graph, [x]), evaluate(two, [x])
    assert after.shape == before.shape
    np.testing.assert_allclose(after, before, rtol=1e-4)


def test_truths_and_half_precision() -> None:
    graph = in_parts(reduction("any", (1 << 17,), (0,), "bool"), 2)
    assert steps(graph) == 2
    x = np.zeros(1 << 17, bool)
    assert not evaluate(graph, [x])[0]
    x[77777] = True
    assert evaluate(graph, [x])[0]
    graph = in_parts(reduction("sum", (1 << 17,), (0,), "bfloat16"), 2)
    dtypes = [n.dtype for n in graph.nodes if n.kind is OpKind.REDUCE]
    assert dtypes == ["float32", "float32"], "the parts are not rounded"
    assert graph.nodes[graph.outputs[0]].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("op", "shape", "axes", "threads"),
    [
        ("sum", (LONG // 256, 128), (0, 1), 2),  # short
        ("sum", (4, 1 << 16), (1,), 4),  # a row for each thread
        ("argmax", (1 << 17,), (0,), 2),
        ("sum", ((1 << 17) - 1,), (0,), 2),  # a prime
        ("sum", (1 << 17,), (0,), 1),
    ],
)
def test_others_are_left_as_they_are(op, shape, axes, threads) -> None:
    graph = reduction(op, shape, axes)
    assert in_parts(graph, threads) == graph
