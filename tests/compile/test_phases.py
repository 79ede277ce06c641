"""Strided transposed convolutions, one dense convolution per output phase."""

from __future__ import annotations

import pytest

from tests.families import kernels as K
from torch_pruner.graph.contraction import contraction_of
from torch_pruner.graph.ir import Graph, GraphBuilder

pytestmark = pytest.mark.tvm

TILE = {
    "vl": 16,
    "tm": 6,
    "nv": 1,
    "mc": 1,
    "order": 0,
    "ku": 2,
    "pack": 1,
    "par": 1,
    "ahead": 0,
    "kb": 1,
}


def transposed(
    size: int,
    kernel: int,
    stride: int,
    pad: int,
    more: int,
    *,
    static: bool = True,
    rank: int = 2,
    batch: int = 1,
) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (batch, 6, *(size,) * rank), "float32")
    w = b.input(1, (6, 20, *(kernel,) * rank), "float32", static=static)
    extent = (size - 1) * stride - 2 * pad + kernel + more
    shape, each = (batch, 20, *(extent,) * rank), (1,) * rank
    y = b.append(
        "conv_transpose", (x, w), shape, "float32", stride=(stride,) * rank, lo=(pad,) * rank,
        dilation=each, groups=1,
    )  # fmt: skip
    return b.finish([b.permute(b.pointwise("relu", y), (0, *range(2, rank + 2), 1))])


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(
    "geometry",
    [(4, 4, 2, 1, 0), (5, 3, 2, 1, 1), (5, 2, 2, 0, 0), (5, 1, 2, 0, 1), (4, 6, 3, 2, 1),
     (4, 5, 3, 1, 0), (4, 4, 2, 3, 0), (5, 7, 2, 3, 1)],
)  # fmt: skip
def test_phases(geometry: tuple[int, ...], static: bool) -> None:
    spec = transposed(*geometry, static=static)
    assert contraction_of(spec).form == "conv_phases"
    outputs, expected, _ = K.run(spec, "contraction", TILE)
    assert K.error(outputs, expected) < 1e-5


@pytest.mark.parametrize(("rank", "batch"), [(1, 3), (3, 1)])
def test_other_ranks(rank: int, batch: int) -> None:
    spec = transposed(3, 3, 2, 1, 1, rank=rank, batch=batch)
    outputs, expected, _ = K.run(spec, "contraction", {**TILE, "tm": 3, "mc": 2})
    assert K.error(outputs, expected) < 1e-5


def test_positions_that_do_not_divide_evenly() -> None:
    spec = transposed(5, 3, 2, 1, 0)
    assert contraction_of(spec).form == "conv_transpose"
    outputs, expected, _ = K.run(spec, "contraction", TILE)
    assert K.error(outputs, expected) < 1e-5
