"""Gradients of depthwise weights: borders, strides, ragged channels, long lines, many images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.families import kernels as K
from torch_pruner.families import named, sketches_for
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

TILE = {"vl": 16, "nv": 1, "tc": 3, "lb": 4, "mc": 2, "par": 1}


def gradient(
    channels: int,
    size: Sequence[int],
    kernel: int,
    stride: int = 1,
    pad: int = 1,
    *,
    dilation: int = 1,
    batch: int = 2,
    dtype: str = "float32",
    last: bool = True,
) -> Graph:
    """As ``convolution_backward`` is lowered; ``last``: operands lie channels last."""
    b, rank = GraphBuilder(), len(size)
    axes = (0, rank + 1, *range(1, rank + 1))
    reach = dilation * (kernel - 1) + 1
    result = tuple((n + 2 * pad - reach) // stride + 1 for n in size)
    cut = tuple(min(n, (r - 1) * stride + reach - pad) for n, r in zip(size, result, strict=True))

    def operand(index: int, space: Sequence[int]) -> int:
        if last:
            return b.permute(b.input(index, (batch, *space, channels), dtype), axes)
        return b.input(index, (batch, channels, *space), dtype)

    x, grad = operand(0, size), operand(1, result)
    if cut != tuple(size):
        x = b.append(
            "slice", (x,), (batch, channels, *cut), dtype, starts=(0,) * (rank + 2),
            steps=(1,) * (rank + 2),
        )  # fmt: skip
    x = b.reshape(x, (batch, channels, 1, *cut))
    x = b.permute(x, (2, 1, 0, *range(3, 3 + rank)))
    x = b.reshape(x, (1, channels * batch, *cut))
    taps = b.permute(grad, (1, 0, *range(2, 2 + rank)))
    hi = tuple((r - 1) * stride + reach - n - pad for n, r in zip(cut, result, strict=True))
    y = b.append(
        "conv", (x, taps), (1, channels, *(kernel,) * rank), dtype, stride=(dilation,) * rank,
        lo=(pad,) * rank, hi=hi, dilation=(stride,) * rank, groups=channels,
    )  # fmt: skip
    y = b.permute(y, (1, 0, *range(2, 2 + rank)))
    return b.finish([b.pointwise("mul", y, b.const(0.5, dtype))])


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (gradient(32, (14, 14), 3), {}),
        (gradient(40, (15, 13), 3, 2), {"lb": 5, "mc": 3}),
        (gradient(50, (9, 8), 5, 1, 2, batch=3), {"tc": 2, "nv": 2}),
        (gradient(96, (7, 7), 7, 1, 3), {"tc": 7, "nv": 4, "lb": 14, "mc": 1, "par": 0}),
        (gradient(24, (12, 12), 3, 2, 0), {"tc": 1}),  # the last line and column read nothing
        (gradient(20, (11, 11), 3, 1, 2, dilation=2), {}),
        (gradient(17, (10, 10), 3, 1, 0, batch=1), {}),
        (gradient(16, (3, 2), 3), {"lb": 1}),
        (gradient(5, (6, 6), 4, 2, 1), {"tc": 4}),
        (gradient(16, (2100,), 9, 1, 4), {"tc": 9, "lb": 1, "mc": 4}),
        (gradient(16, (2100,), 9, 2, 0, batch=1), {"tc": 5, "lb": 1, "mc": 2}),
        (gradient(18, (4, 5, 6), 3), {"tc": 3, "lb": 3, "mc": 8}),
        (gradient(32, (14, 14), 3, dtype="bfloat16"), {}),
    ],
)
def test_gradients_of_depthwise_weights(spec: Graph, changes: dict[str, int]) -> None:
    assert named("depthwise_gradient").matches(Task("t", spec, TargetSpec.detect(2), 2))
    outputs, expected, _ = K.run(spec, "depthwise_gradient", {**TILE, **changes})
    assert K.error(outputs, expected) < (1e-2 if spec.nodes[0].dtype == "bfloat16" else 1e-5)


def test_other_orders_of_axes_are_left_to_products() -> None:
    task = Task("t", gradient(32, (14, 14), 3, last=False), TargetSpec.detect(2), 2)
    names = [s.name for s in sketches_for(task)]
    assert "depthwise_gradient" not in names
    assert "contraction" in names


@pytest.mark.parametrize(
    "spec",
    [gradient(8, (1, 1), 3), gradient(24, (30, 31), 5, 2, 2), gradient(3, (40,), 31, 1, 15)],
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
