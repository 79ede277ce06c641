"""Convolutions of bfloat16 and their gradients by AVX512-BF16 and by AMX against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.families import kernels as K
from torch_pruner.families.bf16_pairs.form import LINES, PLANES, ROWS, TAPS, WINDOWS, ways
from torch_pruner.families.bf16_pairs.space import Bf16PairsSketch
from torch_pruner.families.bf16_tiles.space import Bf16TilesSketch
from torch_pruner.graph.contraction import contraction_of
from torch_pruner.graph.precision import allow_fast
from torch_pruner.target import TargetSpec, tiles_allowed
from torch_pruner.task import Task

if TYPE_CHECKING:
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

TARGET = TargetSpec.detect(2)
PAIRS = {"tm": 5, "nv": 2, "mc": 2, "order": 0, "ku": 2, "tasks": 2, "ahead": 0}
TILES = {"rt": 2, "nv": 2, "mc": 2, "order": 1, "ku": 1, "tasks": 2, "ahead": 0}
BOUND = 1e-2  # of the largest result: bfloat16 has 8 bits

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


def conv(*sizes: int, static: bool = True, rank: int = 2, groups: int = 1) -> Graph:
    return K.conv(*sizes, groups=groups, rank=rank, batch=2, dtype="bfloat16", static=static)  # type: ignore[misc]


def transposed(*sizes: int, static: bool = False, last: bool = True) -> Graph:
    return K.conv_transpose(*sizes, dtype="bfloat16", static=static, last=last)  # type: ignore[misc]


def gradient(*sizes: int, rank: int = 2, batch: int = 2) -> Graph:
    return K.weight_gradient(*sizes, rank=rank, batch=batch, dtype="bfloat16")  # type: ignore[misc]


def agrees(spec: Graph, family: str, decisions: dict[str, int]) -> None:
    outputs, expected, _ = K.run(spec, family, decisions)
    assert K.error(outputs, expected) < BOUND


FORWARD = {  # channels, size, out, kernel, stride, pad
    "3x3": conv(32, 9, 24, 3, 1, 1),
    "3x3 that changes": conv(64, 9, 24, 3, 1, 1, static=False),
    "strided": conv(32, 11, 20, 3, 2, 1),
    "strided that changes": conv(32, 11, 20, 3, 2, 1, static=False),
    "1x1 in place": conv(32, 7, 40, 1, 1, 0),
    "no padding": conv(32, 19, 16, 3, 1, 0, static=False),
    "grouped": conv(64, 8, 64, 3, 1, 1, groups=2),
    "1d": conv(32, 40, 16, 5, 1, 2, rank=1, static=False),
    "3d": conv(32, 5, 16, 3, 1, 1, rank=3),
}


@either
@pytest.mark.parametrize("spec", FORWARD.values(), ids=FORWARD)
def test_every_way(family: str, decisions: dict[str, int], spec: Graph) -> None:
    found = ways(spec, family)
    assert WINDOWS in found
    for way in found:
        agrees(spec, family, decisions | {"way": way})


TRANSPOSED = {
    "the input's gradient": transposed(32, 9, 24, 3, 1, 1),
    "of constant weights": transposed(32, 9, 40, 3, 1, 1, static=True),
    "strided": transposed(32, 8, 48, 4, 2, 1),
    "strided, of constants": transposed(32, 8, 48, 4, 2, 1, static=True),
    "taps past the kernel": transposed(32, 7, 16, 3, 2, 1),
    "a last panel of one column": transposed(32, 9, 33, 2, 1, 0),
    "part of a panel": transposed(32, 9, 40, 2, 1, 0),
    "channels apart": transposed(32, 9, 24, 3, 1, 1, last=False),
}


@either
@pytest.mark.parametrize("spec", TRANSPOSED.values(), ids=TRANSPOSED)
def test_transposed(family: str, decisions: dict[str, int], spec: Graph) -> None:
    assert ways(spec, family) == [WINDOWS]
    agrees(spec, family, decisions | {"way": WINDOWS})


FEW_CHANNELS = {
    "the first layer": conv(3, 29, 32, 7, 2, 3),
    "the first layer in training": conv(3, 29, 32, 7, 2, 3, static=False),
    "3x3": conv(3, 18, 24, 3, 1, 1, static=False),
    "patches": conv(3, 32, 40, 8, 8, 0),
    "odd": conv(5, 11, 16, 3, 2, 1),
    "1d": conv(1, 60, 16, 11, 5, 4, rank=1, static=False),
    "3d": conv(3, 7, 16, 3, 1, 1, rank=3, static=False),
}


@either
@pytest.mark.parametrize("spec", FEW_CHANNELS.values(), ids=FEW_CHANNELS)
def test_few_channels(family: str, decisions: dict[str, int], spec: Graph) -> None:
    assert LINES in ways(spec, family)
    changes = {"tm": min(5, contraction_of(spec).m[-1])} if family == "bf16_pairs" else {}
    agrees(spec, family, decisions | changes | {"way": LINES})


GRADIENTS = {
    "3x3": gradient(16, 8, 32, 3, 1, 1),
    "long lines": gradient(32, 20, 16, 3, 1, 1),
    "uneven": gradient(20, 9, 24, 3, 1, 1),
    "part of a panel": gradient(32, 7, 50, 3, 1, 1),
    "strided": gradient(16, 9, 32, 3, 2, 1),
    "strided, long lines": gradient(16, 36, 32, 3, 2, 1),
    "positions nobody reads": gradient(16, 8, 32, 3, 2, 0),
    "1x1": gradient(24, 7, 16, 1, 1, 0, batch=3),
    "1x1, strided": gradient(48, 8, 16, 1, 2, 0),
    "few channels": gradient(3, 14, 64, 7, 2, 3),
    "more border than input": gradient(8, 6, 32, 5, 1, 4),
    "1d": gradient(16, 12, 32, 3, 1, 1, rank=1),
    "3d": gradient(6, 4, 16, 3, 1, 1, rank=3, batch=1),
}


@either
@pytest.mark.parametrize("spec", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_weights(family: str, decisions: dict[str, int], spec: Graph) -> None:
    changes = {"tm": min(5, contraction_of(spec).m[0])} if family == "bf16_pairs" else {}
    found = [way for way in ways(spec, family) if way in (PLANES, TAPS)]
    assert found
    for way in found:
        agrees(spec, family, decisions | changes | {"way": way})


@either
def test_float32_is_rounded_on_the_way(family: str, decisions: dict[str, int]) -> None:
    for spec, way in [
        (K.conv(32, 9, 24, 3, 1, 1, static=False), WINDOWS),
        (K.conv_transpose(32, 9, 24, 3, 1, 1, static=False, last=True), WINDOWS),
        (K.conv(3, 19, 24, 5, 2, 2, static=False), LINES),
        (K.weight_gradient(16, 20, 32, 3, 1, 1), PLANES),
        (K.weight_gradient(16, 9, 32, 3, 1, 1), TAPS),
    ]:
        outputs, expected, _ = K.run(allow_fast(spec), family, decisions | {"way": way})
        assert 0 < K.error(outputs, expected) < BOUND


@either
def test_what_is_no_number_stays_that(family: str, decisions: dict[str, int]) -> None:
    spec = conv(32, 9, 24, 3, 1, 1, static=False)
    inputs = K.inputs_for(spec)
    inputs[0][0, 3, 5, 7], inputs[0][1, 7, 2, 9] = np.nan, np.inf
    for way in ways(spec, family):
        outputs, expected, _ = K.run(spec, family, decisions | {"way": way}, inputs=inputs)
        assert np.array_equal(np.isnan(outputs[0]), np.isnan(expected[0]))


@pytest.mark.parametrize(
    "kind", [pytest.param(Bf16PairsSketch, marks=pairs), pytest.param(Bf16TilesSketch, marks=tiles)]
)
@pytest.mark.parametrize(
    "spec",
    [
        FORWARD["3x3 that changes"],
        FORWARD["strided"],
        FORWARD["grouped"],
        TRANSPOSED["strided"],
        GRADIENTS["uneven"],
        GRADIENTS["strided, long lines"],
    ],
    ids=["3x3", "strided", "grouped", "transposed", "gradient", "strided gradient"],
)
def test_points_of_the_space(kind: type[Sketch], spec: Graph) -> None:
    for decisions in K.points(kind(Task("kernel", spec, TARGET, 2)), 12):
        agrees(spec, kind.name, decisions)


def test_ways_that_there_are() -> None:
    few = conv(3, 12, 16, 5, 2, 2)
    assert ways(few, "bf16_tiles") == ways(few, "bf16_pairs") == [ROWS, LINES]
    patches = conv(64, 28, 16, 14, 14, 0, static=False)  # more positions summed than results
    assert ways(patches, "bf16_tiles") == [ROWS, WINDOWS, PLANES, TAPS]
    assert ways(K.linear(8, 8, 8, dtype="bfloat16"), "bf16_tiles") == [ROWS]
