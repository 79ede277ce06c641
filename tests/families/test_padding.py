"""Tiles of padded convolutions skip kernel offsets that only meet padding."""

from __future__ import annotations

import pytest

from tests.families import kernels as K
from torch_pruner.graph.ir import Graph, GraphBuilder

pytestmark = pytest.mark.tvm

TILE = {"vl": 16, "nv": 1, "mc": 2, "order": 0, "ku": 2, "pack": 1, "par": 1, "ahead": 0, "kb": 1}


def padded(
    lines: int, columns: int, *, kernel: int = 3, stride: int = 1, gap: int = 1, lo: int = 1
) -> Graph:
    b = GraphBuilder()
    x = b.permute(b.input(0, (1, lines, columns, 6), "float32"), (0, 3, 1, 2))
    w = b.input(1, (20, 6, kernel, kernel), "float32", static=True)
    reach = gap * (kernel - 1) + 1
    out = tuple((n + 2 * lo - reach) // stride + 1 for n in (lines, columns))
    both = {"stride": (stride,) * 2, "lo": (lo,) * 2, "hi": (lo,) * 2, "dilation": (gap,) * 2}
    y = b.append("conv", (x, w), (1, 20, *out), "float32", groups=1, **both)
    return b.finish([b.permute(b.pointwise("relu", y), (0, 2, 3, 1))])


@pytest.mark.parametrize("tm", [1, 2, 3, 6, 5])
@pytest.mark.parametrize(
    "spec",
    [
        padded(6, 6), padded(5, 12, gap=4, lo=4), padded(6, 12, gap=5, lo=5),
        padded(12, 12, stride=2),
        padded(4, 6, kernel=5, lo=2), padded(7, 12, kernel=7, stride=2, lo=3), padded(6, 4, lo=2),
    ],
)  # fmt: skip
def test_skipped_offsets(spec: Graph, tm: int) -> None:
    outputs, expected, _ = K.run(spec, "contraction", {**TILE, "tm": tm})
    assert K.error(outputs, expected) < 1e-5


def test_a_dilated_convolution_of_one_dimension() -> None:
    spec = K.conv(8, 20, 16, 3, 1, 1, rank=1)
    outputs, expected, _ = K.run(spec, "contraction", {**TILE, "tm": 1})
    assert K.error(outputs, expected) < 1e-5
