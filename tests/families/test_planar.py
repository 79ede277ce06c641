"""Convolutions whose channels lie in planes: borders, strides, dilations, groups, long sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.families import kernels as K
from torch_pruner import families
from torch_pruner.families.kinds import in_planes
from torch_pruner.families.planar.form import planes_of
from torch_pruner.graph.contraction import contraction_of
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

TILE = {"vl": 16, "tm": 6, "nv": 2, "ln": 2, "rp": 1, "mc": 4, "par": 1, "cp": 1, "bl": 0}


CASES = [
    (K.planar(8, (14, 14), 12, (3, 3), 1, 1), {}),
    (K.planar(8, (7, 7), 13, (3, 3), 1, 1, residual=True), {"ln": 7, "rp": 2}),
    (K.planar(8, (15, 13), 10, (3, 3), 2, 1), {"ln": 3, "tm": 4}),
    (K.planar(3, (23, 23), 9, (7, 7), 2, 3), {"ln": 5, "nv": 3}),
    (K.planar(20, (9, 9), 8, (1, 1)), {"ln": 4, "mc": 3}),
    (K.planar(20, (9, 9), 8, (1, 1)), {"ln": 4, "mc": 3, "cp": 0}),
    (K.planar(20, (8, 8), 14, (1, 1), groups=2, batch=2), {"ln": 8, "mc": 3, "cp": 0, "tm": 4}),
    (K.planar(6, (90,), 7, (1,), batch=2, residual=True), {"ln": 1, "cp": 0}),
    (K.planar(1100, (6, 6), 5, (1, 1)), {"ln": 6, "tm": 3, "cp": 0}),
    (K.planar(6, (3, 7, 8), 7, (1, 1, 1)), {"ln": 7, "rp": 2, "cp": 0, "tm": 2}),
    (K.planar(9, (10, 10), 8, (1, 1), 2), {"ln": 4}),
    (K.planar(6, (12, 12), 6, (3, 3), 1, 1, 6), {"tm": 1, "nv": 4, "ln": 5}),
    (K.planar(6, (12, 12), 12, (5, 5), 2, 2, 6), {"tm": 2, "ln": 6, "par": 0, "mc": 1}),
    (K.planar(8, (12, 12), 16, (3, 3), 1, 1, 4), {"tm": 4, "ln": 12}),
    (K.planar(8, (14, 14), 8, (3, 3), 1, 2, dilation=2), {"ln": 3}),
    (K.planar(8, (15, 15), 8, (3, 3), 2, 3, dilation=3), {"ln": 3}),
    (K.planar(8, (14, 14), 8, (3, 3), 2, 2, dilation=2), {"ln": 2, "vl": 8}),
    (K.planar(5, (40,), 7, (3,), 2, 1, batch=2), {"ln": 1}),
    (K.planar(4, (66,), 5, (3,), 2, 1), {"ln": 1}),
    (K.planar(3, (20, 65), 5, (7, 7), 2, 3), {"ln": 4, "tm": 4}),
    (K.planar(6, (10, 96), 6, (3, 3), 2, 1, 6), {"tm": 1, "nv": 4, "ln": 5}),
    (K.planar(4, (9, 64), 5, (1, 1), 2), {"ln": 3}),
    (K.planar(4, (9, 33), 5, (2, 2), 2, 0, residual=True), {"ln": 3}),
    (K.planar(130, (6, 5), 5, (3, 3), 1, 1), {"ln": 6, "tm": 3}),
    (K.planar(1100, (4, 4), 5, (1, 1)), {"ln": 4, "tm": 3}),
    (K.planar(4, (5, 6, 7), 6, (3, 3, 3), 1, 1, batch=2), {"ln": 3}),
    (K.planar(4, (6, 9, 9), 6, (3, 5, 5), 2, 2), {"ln": 2, "nv": 1}),
    (K.planar(2, (11, 11), 4, (11, 11), 1, 5), {"ln": 4, "tm": 4, "nv": 3}),
    # Vectors below one another: last lines and ends again, strides, dilations, short lines.
    (K.planar(6, (12, 37), 6, (3, 3), 1, 1, 6), {"tm": 1, "nv": 4, "ln": 6, "bl": 1}),
    (K.planar(6, (13, 20), 6, (5, 5), 1, 2, 6), {"tm": 1, "nv": 5, "ln": 7, "bl": 1}),
    (K.planar(5, (7, 7), 5, (3, 3), 1, 1, 5), {"tm": 1, "nv": 7, "ln": 7, "bl": 1, "vl": 8}),
    (K.planar(6, (15, 34), 6, (3, 3), 2, 1, 6), {"tm": 1, "nv": 3, "ln": 4, "bl": 1}),
    (K.planar(6, (15, 34), 6, (3, 3), 2, 3, 6, dilation=3), {"tm": 1, "nv": 3, "ln": 4, "bl": 1}),
    (K.planar(4, (9, 21), 8, (3, 3), 1, 2, 2, dilation=2), {"tm": 3, "nv": 2, "ln": 3, "bl": 1}),
    (K.planar(130, (6, 8), 5, (3, 3), 1, 1), {"tm": 3, "nv": 3, "ln": 6, "bl": 1, "vl": 8}),
    (K.planar(4, (5, 6, 17), 4, (3, 3, 3), 1, 1, 4), {"tm": 1, "nv": 2, "ln": 3, "bl": 1}),
    (K.conv_transpose(9, 17, 8, 6, 3, 3, first=True), {"tm": 4, "nv": 2, "ln": 5, "bl": 1}),
    (K.conv_transpose(12, 4, 20, 4, 2, 1, first=True), {}),
    (K.conv_transpose(10, 5, 7, 4, 2, 1, first=True), {"ln": 3, "tm": 3}),
    (K.conv_transpose(5, 35, 7, 4, 2, 1, first=True), {"ln": 3, "tm": 3}),
    (K.conv_transpose(5, 33, 7, 2, 2, 0, first=True), {"ln": 3, "tm": 3}),
    (K.conv_transpose(9, 6, 8, 6, 3, 0, first=True), {"ln": 4, "tm": 4, "nv": 1}),
    (K.conv_transpose(9, 6, 8, 6, 3, 3, first=True), {"ln": 6, "tm": 4, "nv": 1}),
    (K.conv_transpose(130, 7, 6, 6, 2, 2, first=True), {"ln": 7, "rp": 2, "tm": 3}),
]


@pytest.mark.tvm
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("spec", "changes"), CASES)
def test_planar(spec: Graph, changes: dict[str, int]) -> None:
    outputs, expected, _ = K.run(spec, "planar", {**TILE, **changes})
    assert K.error(outputs, expected) < 1e-5


@pytest.mark.parametrize("spec", [spec for spec, _ in CASES])
def test_drafts_are_points_of_the_space(spec: Graph) -> None:
    task = Task("t", spec, TargetSpec.resolve("auto", 2), 2)
    assert families.named("planar").matches(task)
    sketch = families.named("planar").space()(task)
    point = sketch.default()[None]
    assert sketch.valid(point).all()
    assert 0 < sketch.symbols(point).latency_s[0] < 1


def test_channels_that_lie_last_are_not_for_planes() -> None:
    assert not in_planes(K.conv(8, 14, 8, 3, 1, 1))


@pytest.mark.parametrize(
    ("stride", "dilation", "phases"),
    [
        (1, 1, [(0, 0, 1, 3, 0, 1)]),
        (2, 1, [(0, 0, 2, 2, 0, 1), (1, 1, 2, 1, 0, 1)]),
        (2, 2, [(0, 0, 1, 3, 0, 1)]),
        (2, 3, [(0, 0, 2, 2, 0, 3), (1, 1, 2, 1, 1, 3)]),
        (1, 4, [(0, 0, 1, 3, 0, 4)]),
    ],
)
def test_phases(stride: int, dilation: int, phases: list[tuple[int, ...]]) -> None:
    spec = K.planar(4, (20, 20), 4, (3, 3), stride, dilation, dilation=dilation)
    found = planes_of(spec, contraction_of(spec)).phases(2)
    assert [(p.number, p.first, p.step, p.count, p.shift, p.apart) for p in found] == phases
