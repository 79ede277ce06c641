"""Depthwise and grouped convolutions read in place: borders, strides, ragged channels, orders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.families import kernels as K

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
