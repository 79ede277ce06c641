"""Depthwise and grouped convolutions read in place: borders, strides, ragged channels, orders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.families import kernels as K
from tests.unit.tuner import graphs_by_kind as G
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

TILE = {"vl": 16, "tw": 7, "th": 2, "nv": 1, "mc": 4, "order": 0, "par": 1}


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (K.conv(32, 14, 32, 3, 1, 1, 32), {"order": 0}),
        (K.conv(32, 14, 32, 3, 1, 1, 32), {"order": 1, "tw": 5}),
        (K.conv(96, 15, 96, 3, 2, 1, 96), {"order": 2, "tw": 3, "th": 3, "nv": 4}),
        (K.conv(24, 14, 24, 5, 2, 2, 24), {"order": 1}),
        (K.conv(50, 15, 50, 3, 1, 0, 50), {"tw": 4, "th": 1, "nv": 2, "mc": 1, "par": 0}),
        (K.conv(5, 9, 5, 3, 1, 1, 5), {"order": 2}),
        (K.conv(16, 3, 16, 5, 1, 2, 16), {"tw": 3, "th": 1}),
        (K.conv(16, 20, 16, 3, 1, 1, 16, rank=1), {"th": 1}),
        (K.conv(20, 5, 20, 3, 1, 1, 20, rank=3, batch=2), {"order": 1, "tw": 5}),
    ],
)
def test_depthwise(spec: Graph, changes: dict[str, int]) -> None:
    outputs, expected, _ = K.run(spec, "depthwise", {**TILE, **changes})
    assert K.error(outputs, expected) < 1e-5


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (K.conv(24, 14, 48, 3, 1, 1, 3), {"tw": 5}),
        (K.conv(32, 15, 32, 3, 2, 1, 8), {"vl": 4, "order": 2}),
        (K.conv(24, 9, 48, 5, 1, 2, 3), {"vl": 8, "nv": 2, "tw": 4, "order": 1}),
        (K.conv(16, 20, 16, 3, 1, 1, 2, rank=1), {"vl": 8, "mc": 1}),
    ],
)
def test_groups(spec: Graph, changes: dict[str, int]) -> None:
    outputs, expected, _ = K.run(spec, "depthwise", {**TILE, "th": 1, **changes})
    assert K.error(outputs, expected) < 1e-5


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (K.conv(40, 14, 40, 3, 1, 1, 40, static=False), {"order": 1}),
        (K.conv(50, 15, 50, 3, 2, 1, 50, static=False), {"order": 2, "th": 1, "par": 0, "mc": 1}),
        (K.conv(24, 9, 24, 3, 1, 1, 24, static=False, dtype="bfloat16"), {}),
        (K.conv(20, 5, 20, 3, 1, 1, 20, rank=3, batch=2, static=False), {"order": 1, "tw": 5}),
    ],
)
def test_weights_that_change_from_call_to_call(spec: Graph, changes: dict[str, int]) -> None:
    outputs, expected, _ = K.run(spec, "depthwise", {**TILE, **changes})
    assert K.error(outputs, expected) < (1e-2 if spec.nodes[0].dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (G.depthwise_transposed(32, (14, 14), 3, 1, 1), {}),
        (G.depthwise_transposed(40, (7, 9), 3, 2, 1, more=1), {"tw": 6}),
        (G.depthwise_transposed(40, (7, 9), 3, 2, 1), {"tw": 4, "th": 1, "order": 1}),
        (
            G.depthwise_transposed(24, (6, 5), 5, 2, 2, more=1, batch=2, static=True),
            {"tw": 2, "order": 2},
        ),
        (G.depthwise_transposed(16, (5, 5), 7, 4, 3, more=3), {"tw": 4, "th": 4}),
        (G.depthwise_transposed(17, (5, 4), 3, 3, 0), {"tw": 6, "th": 3, "order": 1}),
        (G.depthwise_transposed(16, (9, 3), 1, 2, 0, more=1), {"tw": 2}),
        (G.depthwise_transposed(16, (3, 3), 2, 2, 0), {"tw": 12, "th": 2, "order": 2}),
        (G.depthwise_transposed(20, (6, 6), 3, 2, 2, dilation=2, more=1), {"tw": 4}),
        (
            G.depthwise_transposed(16, (5, 5), 3, 1, 3),
            {"tw": 2, "th": 1},
        ),  # more than the kernel reaches
        (G.depthwise_transposed(16, (11,), 3, 2, 1, more=1), {"tw": 4, "th": 1}),
        (G.depthwise_transposed(18, (3, 4, 5), 3, 2, 1, more=1), {"tw": 4, "order": 1}),
        (
            G.depthwise_transposed(18, (3, 4, 5), 3, 2, 1),
            {"tw": 4, "th": 1, "nv": 2, "par": 0, "mc": 1},
        ),
    ],
)
def test_transposed(spec: Graph, changes: dict[str, int]) -> None:
    outputs, expected, _ = K.run(spec, "depthwise", {**TILE, **changes})
    assert K.error(outputs, expected) < 1e-5


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [(1, 1), (5, 3), (30, 31)])
def test_some_point_of_every_space_can_be_emitted(stride: int, size: tuple[int, int]) -> None:
    from torch_pruner.families import named

    spec = G.depthwise_transposed(24, size, 3, stride, 1, more=stride - 1)
    task = Task("t", spec, TargetSpec.detect(2), 2)
    assert named("depthwise").matches(task)
    sketch = named("depthwise").space()(task)
    point = sketch.default()
    assert sketch.valid(point[None])[0]
    outputs, expected, _ = K.run(task.spec, "depthwise", sketch.named(point))
    assert K.error(outputs, expected) < 1e-5
