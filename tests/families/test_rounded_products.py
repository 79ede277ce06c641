"""Products of float32 in bfloat16, as ``fast_math`` allows them, against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.families import kernels as K
from torch_pruner.families.bf16_pairs.space import Bf16PairsSketch
from torch_pruner.families.bf16_tiles.space import Bf16TilesSketch
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.precision import allow_fast
from torch_pruner.target import TargetSpec, tiles_allowed
from torch_pruner.task import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.families.space import Sketch

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

TARGET = TargetSpec.detect(2)
PAIRS = {"tm": 6, "nv": 2, "mc": 1, "order": 0, "ku": 2, "tasks": 2, "ahead": 0, "way": 0}
TILES = {"rt": 2, "nv": 2, "mc": 1, "order": 0, "ku": 1, "tasks": 2, "ahead": 0, "way": 0}
BOUND = 2.0**-7  # of the largest result: each operand is off by 2**-9 of itself

pairs = pytest.mark.skipif(not TARGET.bf16_dot, reason="needs AVX512-BF16")
tiles = pytest.mark.skipif(
    not (TARGET.bf16_tiles and tiles_allowed()), reason="needs AMX with bfloat16"
)
either = pytest.mark.parametrize(
    ("family", "decisions"),
    [
        pytest.param("bf16_pairs", PAIRS, marks=pairs),
        pytest.param("bf16_tiles", TILES, marks=tiles),
    ],
)


def linear(m: int, n: int, k: int, *, static: bool = True) -> Graph:
    return allow_fast(K.linear(m, n, k, static=static))


def scores(heads: int, rows: int, dim: int) -> Graph:
    """Queries and keys of several heads in one buffer, both read through views."""
    b = GraphBuilder()
    x = b.input(0, (1, rows, 2 * heads * dim), "float32")
    parts = [b.slice(x, (0, 0, s), (1, rows, heads * dim)) for s in (0, heads * dim)]
    q, k = (b.permute(b.reshape(t, (1, rows, heads, dim)), (0, 2, 1, 3)) for t in parts)
    return allow_fast(b.finish([b.matmul(q, b.permute(k, (0, 1, 3, 2)))]))


def produced(m: int, n: int, k: int, *, weight: str = "float32") -> Graph:
    """A first operand that the kernel computes, and weights that may be bfloat16 already."""
    b = GraphBuilder()
    x, w = b.input(0, (m, k), "float32"), b.input(1, (k, n), weight, static=True)
    y = b.append("matmul", (b.pointwise("relu", x), w), (m, n), "float32")
    return allow_fast(b.finish([b.pointwise("relu", y)]))


def convolution(
    channels: int,
    size: int,
    out: int,
    kernel: int,
    stride: int = 1,
    pad: int = 0,
    dilation: int = 1,
) -> Graph:
    """Channels last on both sides, as graphs are laid out, and an epilogue."""
    b = GraphBuilder()
    x = b.input(0, (2, size, size + 1, channels), "float32")
    w = b.input(1, (out, channels, kernel, kernel), "float32", static=True)
    reach = dilation * (kernel - 1) + 1
    dims = [(s + 2 * pad - reach) // stride + 1 for s in (size, size + 1)]
    y = b.append(
        "conv", (b.permute(x, (0, 3, 1, 2)), w), (2, out, *dims), "float32",
        stride=(stride,) * 2, lo=(pad,) * 2, hi=(pad,) * 2, dilation=(dilation,) * 2, groups=1,
    )  # fmt: skip
    return allow_fast(b.finish([b.permute(b.pointwise("relu", y), (0, 2, 3, 1))]))


def agrees(spec: Graph, family: str, decisions: Mapping[str, int]) -> None:
    outputs, expected, _ = K.run(spec, family, decisions)
    assert 0 < K.error(outputs, expected) < BOUND


@either
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 33, 47])
def test_every_number_of_rows(family: str, decisions: dict[str, int], rows: int) -> None:
    changes = {"tm": min(6, rows)} if family == "bf16_pairs" else {"rt": 1 if rows <= 16 else 2}
    agrees(linear(rows, 48, 64), family, decisions | changes)


@either
@pytest.mark.parametrize("depth", [3, 31, 33, 64, 100])
@pytest.mark.parametrize("columns", [15, 32, 50])
@pytest.mark.parametrize("static", [True, False])
def test_every_depth_and_width(
    family: str, decisions: dict[str, int], depth: int, columns: int, static: bool
) -> None:
    agrees(linear(19, columns, depth, static=static), family, decisions)


@either
@pytest.mark.parametrize(
    "spec",
    [
        scores(4, 33, 32),
        scores(3, 20, 15),
        produced(23, 33, 45),
        produced(23, 33, 45, weight="bfloat16"),
    ],
    ids=["scores", "odd scores", "produced", "narrow weights"],
)
def test_operands_through_views(family: str, decisions: dict[str, int], spec: Graph) -> None:
    agrees(spec, family, decisions)


CONVOLUTIONS = {
    "3x3": convolution(16, 9, 24, 3, 1, 1),
    "strided": convolution(32, 10, 20, 3, 2, 1),
    "few channels": convolution(3, 12, 16, 5, 2, 2),
    "odd channels": convolution(20, 7, 33, 3, 1, 1),
    "dilated": convolution(16, 11, 16, 3, 1, 2, 2),
    "1x1": convolution(24, 6, 40, 1),
    "no padding": convolution(16, 8, 16, 3),
}


@either
@pytest.mark.parametrize("spec", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(family: str, decisions: dict[str, int], spec: Graph) -> None:
    agrees(spec, family, decisions)


@either
def test_what_is_no_number_stays_that(family: str, decisions: dict[str, int]) -> None:
    """Rounding a NaN by its bits alone could make it an infinity."""
    spec = linear(16, 32, 64)
    inputs = K.inputs_for(spec)
    inputs[0][0, 3, 5], inputs[0][0, 7, 9] = np.nan, np.inf
    outputs, expected, _ = K.run(spec, family, decisions, inputs=inputs)
    got, want = outputs[0], expected[0]
    assert np.array_equal(np.isnan(got), np.isnan(want))
    assert np.array_equal(np.isinf(got), np.isinf(want))


@pytest.mark.parametrize(
    "kind", [pytest.param(Bf16PairsSketch, marks=pairs), pytest.param(Bf16TilesSketch, marks=tiles)]
)
@pytest.mark.parametrize(
    "spec",
    [linear(70, 70, 96), scores(3, 40, 32), CONVOLUTIONS["strided"]],
    ids=["linear", "scores", "convolution"],
)
def test_points_of_the_space(kind: type[Sketch], spec: Graph) -> None:
    for decisions in K.points(kind(Task("kernel", spec, TARGET, 2)), 12):
        agrees(spec, kind.name, decisions)
