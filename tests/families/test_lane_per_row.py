"""Rows side by side in memory, as channels of a channels-last value are, each in its own lane."""

from __future__ import annotations

import numpy as np
import pytest

from tests.families import kernels as K
from torch_pruner.families import sketches_for
from torch_pruner.families.lane_per_row.space import LanePerRowSketch
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

pytestmark = pytest.mark.tvm
NCHW, NHWC = (0, 3, 1, 2), (0, 2, 3, 1)


def statistics(shape: tuple[int, ...]) -> Graph:
    """Mean and variance of each channel, in two passes that depend on each other."""
    n, h, w, c = shape
    b = GraphBuilder()
    x = b.permute(b.input(0, shape, "float32"), NCHW)
    scale = b.const(1 / (n * h * w), "float32")
    mean = b.pointwise("mul", b.reduce("sum", x, (0, 2, 3), keepdim=True), scale)
    centred = b.pointwise("sub", x, mean)
    squares = b.reduce("sum", b.pointwise("mul", centred, centred), (0, 2, 3), keepdim=True)
    variance = b.pointwise("mul", squares, scale)
    return b.finish([b.reshape(mean, (c,)), variance])


def gradient(shape: tuple[int, ...]) -> Graph:
    """Of batch normalisation: two sums in one pass, then a value for every element."""
    n, h, w, c = shape
    b = GraphBuilder()
    x, g = (b.permute(b.input(i, shape, "float32"), NCHW) for i in (0, 1))
    weight = b.reshape(b.input(2, (c,), "float32"), (1, c, 1, 1))
    both = b.reduce("sum", b.pointwise("mul", x, g), (0, 2, 3), keepdim=True)
    alone = b.reduce("sum", g, (0, 2, 3), keepdim=True)
    scale = b.const(1 / (n * h * w), "float32")
    shift = b.pointwise("mul", b.pointwise("add", alone, b.pointwise("mul", both, x)), scale)
    result = b.pointwise("mul", b.pointwise("sub", g, shift), weight)
    return b.finish([b.permute(result, NHWC), b.reshape(both, (c,))])


def instance(shape: tuple[int, ...]) -> Graph:
    """The largest of each image and channel: two axes stay."""
    b = GraphBuilder()
    x = b.permute(b.input(0, shape, "float32"), NCHW)
    return b.finish([b.pointwise("relu", b.reduce("max", x, (2, 3)))])


def activated(shape: tuple[int, ...]) -> Graph:
    """Statistics of an activation, which each pass computes anew, and the activation itself."""
    n, h, w, c = shape
    b = GraphBuilder()
    x = b.permute(b.input(0, shape, "float32"), NCHW)
    y = b.pointwise("mul", x, b.pointwise("erf", x))
    scale = b.const(1 / (n * h * w), "float32")
    mean = b.pointwise("mul", b.reduce("sum", y, (0, 2, 3), keepdim=True), scale)
    centred = b.pointwise("sub", y, mean)
    squares = b.reduce("sum", b.pointwise("mul", centred, centred), (0, 2, 3), keepdim=True)
    return b.finish([b.permute(y, NHWC), b.reshape(mean, (c,)), squares])


@pytest.mark.parametrize("make", [statistics, gradient, instance, activated])
@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (1, 7, 40, 70), (3, 1, 1, 33), (2, 9, 300, 19)])
@pytest.mark.parametrize("decisions", [{"nv": 1, "par": 0}, {"nv": 2, "par": 1}])
def test_it_agrees_with_the_reference(make, shape, decisions) -> None:
    outputs, expected, _ = K.run(make(shape), "lane_per_row", {"vl": 16, **decisions})
    assert K.error(outputs, expected) < 1e-5


def test_a_sum_of_many_is_exact() -> None:
    """In one accumulator for each lane it would be off by a hundred times as much."""
    b = GraphBuilder()
    spec = b.finish([b.reduce("sum", b.input(0, (300_000, 16), "float32"), (0,))])
    outputs, _, _ = K.run(spec, "lane_per_row", {"vl": 16, "nv": 1, "par": 0})
    (given,) = K.inputs_for(spec)
    exact = given.astype(np.float64).sum(0)
    assert np.abs(outputs[0] - exact).max() < 1e-6 * np.abs(given).sum(0).max()


@pytest.mark.parametrize("make", [statistics, gradient])
def test_it_is_offered_where_rows_lie_side_by_side(make) -> None:
    target = TargetSpec.detect()
    task = Task("t", make((2, 14, 14, 64)), target, 2)
    sketch = next(s for s in sketches_for(task) if isinstance(s, LanePerRowSketch))
    for point in K.points(sketch, 6):
        outputs, expected, _ = K.run(task.spec, "lane_per_row", point)
        assert K.error(outputs, expected) < 1e-5
    along = Task("t", K.layer_norm((8, 64)), target, 2)
    assert not any(isinstance(s, LanePerRowSketch) for s in sketches_for(along))


def test_the_draft_prefers_it() -> None:
    from torch_pruner.compiler.drafting import draft

    task = Task("t", gradient((4, 28, 28, 128)), TargetSpec.detect(2), 2)
    assert draft(task).sketch == "lane_per_row"
    arrays = K.inputs_for(task.spec)
    assert len(evaluate(task.spec, arrays)) == 2


def test_statistics_of_an_activation_have_a_channel_for_each_lane() -> None:
    task = Task("t", activated((2, 14, 14, 128)), TargetSpec.detect(2), 2)
    found = {s.name: s.symbols(s.default()[None]).latency_s[0] for s in sketches_for(task)}
    assert min(found, key=lambda name: found[name]) == "lane_per_row"
