"""Gradients of depthwise weights: borders, strides, ragged channels, long lines, many images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from tests.unit.tuner import graphs_by_kind as G
from torch_pruner.codegen.build.region import parts_of
from torch_pruner.families import named, sketches_for
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

TILE = {"vl": 16, "nv": 1, "tc": 3, "lb": 4, "mc": 2, "par": 1}


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (G.depthwise_gradient(32, (14, 14), 3), {}),
        (G.depthwise_gradient(40, (15, 13), 3, 2), {"lb": 5, "mc": 3}),
        (G.depthwise_gradient(50, (9, 8), 5, 1, 2, batch=3), {"tc": 2, "nv": 2}),
        (
            G.depthwise_gradient(96, (7, 7), 7, 1, 3),
            {"tc": 7, "nv": 4, "lb": 14, "mc": 1, "par": 0},
        ),
        (
            G.depthwise_gradient(24, (12, 12), 3, 2, 0),
            {"tc": 1},
        ),  # the last line and column read nothing
        (G.depthwise_gradient(20, (11, 11), 3, 1, 2, dilation=2), {}),
        (G.depthwise_gradient(17, (10, 10), 3, 1, 0, batch=1), {}),
        (G.depthwise_gradient(16, (3, 2), 3), {"lb": 1}),
        (G.depthwise_gradient(5, (6, 6), 4, 2, 1), {"tc": 4}),
        (G.depthwise_gradient(16, (2100,), 9, 1, 4), {"tc": 9, "lb": 1, "mc": 4}),
        (G.depthwise_gradient(16, (2100,), 9, 2, 0, batch=1), {"tc": 5, "lb": 1, "mc": 2}),
        (G.depthwise_gradient(18, (4, 5, 6), 3), {"tc": 3, "lb": 3, "mc": 8}),
        (G.depthwise_gradient(32, (14, 14), 3, dtype="bfloat16"), {}),
    ],
)
def test_gradients_of_depthwise_weights(spec: Graph, changes: dict[str, int]) -> None:
    assert named("depthwise_gradient").matches(Task("t", spec, TargetSpec.detect(2), 2))
    outputs, expected, _ = K.run(spec, "depthwise_gradient", {**TILE, **changes})
    assert K.error(outputs, expected) < (1e-2 if spec.nodes[0].dtype == "bfloat16" else 1e-5)


def test_other_orders_of_axes_are_left_to_products() -> None:
    task = Task("t", G.depthwise_gradient(32, (14, 14), 3, last=False), TargetSpec.detect(2), 2)
    names = [s.name for s in sketches_for(task)]
    assert "depthwise_gradient" not in names
    assert "contraction" in names


@pytest.mark.parametrize(
    "spec",
    [
        G.depthwise_gradient(8, (1, 1), 3),
        G.depthwise_gradient(24, (30, 31), 5, 2, 2),
        G.depthwise_gradient(3, (40,), 31, 1, 15),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_defaults_can_be_emitted(spec: Graph, threads: int) -> None:
    task = Task("t", spec, TargetSpec.detect(threads), threads)
    for sketch in sketches_for(task):
        if sketch.name != "depthwise_gradient":
            continue
        point = sketch.default()
        assert sketch.valid(point[None])[0]
        outputs, expected, _ = K.run(spec, sketch.name, sketch.named(point), threads)
        assert K.error(outputs, expected) < 1e-5
        return
    raise AssertionError("no sketch")


def test_a_single_tap_of_few_channels_is_divided_among_threads() -> None:
    """What adds the chunks up is one task then, whose buffers must not be the kernel's."""
    spec = G.depthwise_gradient(16, (12, 12), 1, 1, 0)
    decisions = {**TILE, "tc": 1, "mc": 3}
    kernel = schedule(spec, "depthwise_gradient", decisions)
    assert [part.alone for _, part in parts_of(kernel)] == [False, False]
    outputs, expected, _ = K.run(spec, "depthwise_gradient", decisions)
    assert K.error(outputs, expected) < 1e-5
