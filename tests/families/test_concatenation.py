"""Concatenations along the innermost axis, with what is computed from them in the same pass."""

from __future__ import annotations

import pytest

from tests.families import kernels as K
from torch_pruner.codegen.parts.concatenation import joined_innermost
from torch_pruner.families.sweeps import lanes_of
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

pytestmark = pytest.mark.tvm


def normed(*channels: int, size: int = 5, last: bool = True, twice: bool = False) -> Graph:
    """relu(cat * scale + shift) of values that lie channels last, the result too if ``last``."""
    b = GraphBuilder()
    total, to_last = sum(channels), (0, 2, 3, 1)
    parts = [
        b.permute(b.input(i, (1, size, size, c), "float32"), (0, 3, 1, 2))
        for i, c in enumerate(channels)
    ]
    scale, shift = (b.input(len(parts) + k, (total, 1, 1), "float32") for k in range(2))
    x = b.append("cat", parts, (1, total, size, size), "float32", dim=1)
    y = b.pointwise("relu", b.pointwise("add", b.pointwise("mul", x, scale), shift))
    y = b.pointwise("add", y, x) if twice else y
    return b.finish([b.permute(y, to_last) if last else y])


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("channels", [(32, 32), (64, 16, 48), (20, 37, 5, 16), (4, 4), (32, 2)])
def test_parts(channels: tuple[int, ...], twice: bool) -> None:
    spec = normed(*channels, twice=twice)
    assert joined_innermost(spec) is not None
    for chunk, par in ((3, 1), (50, 0)):
        outputs, expected, built = K.run(
            spec, "elementwise", {"vl": 16, "chunk": chunk, "par": par}
        )
        assert K.error(outputs, expected) < 1e-6
    text = built._library.inspect_source("ll")
    if all(c % 16 == 0 for c in channels):
        assert "load float," not in text, "a part is read element by element"


@pytest.mark.parametrize("spec", [normed(32, 32, last=False), normed(8, 2)])
def test_elsewhere_elements_ask(spec: Graph) -> None:
    assert joined_innermost(spec) is None
    outputs, expected, _ = K.run(spec, "elementwise", {"vl": 16, "chunk": 2, "par": 1})
    assert K.error(outputs, expected) < 1e-6


def test_elements_of_another_part_are_asked_for() -> None:
    b = GraphBuilder()
    x, y = (b.input(i, (3, 32), "float32") for i in range(2))
    joined = b.append("cat", (x, y), (3, 64), "float32", dim=1)
    turned = b.append("flip", (joined,), (3, 64), "float32", dims=(1,))
    spec = b.finish([b.pointwise("add", joined, turned)])
    assert joined_innermost(spec) is None
    outputs, expected, _ = K.run(spec, "elementwise", {"vl": 16, "chunk": 2, "par": 1})
    assert K.error(outputs, expected) < 1e-6


def test_rows_that_are_looked_up_lie_side_by_side() -> None:
    b = GraphBuilder()
    tables = [b.input(k, (50, 20), "float32") for k in range(3)]
    at = b.input(3, (40, 3), "int64")
    parts = []
    for k, table in enumerate(tables):
        column = b.reshape(b.slice(at, [0, k], [40, 1]), (40,))
        rows = b.append("take", (table, column), (40, 20), "float32", dim=0)
        parts.append(b.reshape(rows, (40, 1, 20)))
    spec = b.finish([b.append("cat", parts, (40, 3, 20), "float32", dim=1)])
    found = joined_innermost(spec)
    assert found is not None
    assert found[1] == -2
    assert (
        lanes_of(Task("kernel", spec, TargetSpec.detect(1), 1)) * 4
        == TargetSpec.detect(1).vector_bytes
    )
    outputs, expected, _ = K.run(spec, "elementwise", {"vl": 8, "chunk": 50, "par": 1})
    assert K.error(outputs, expected) == 0
