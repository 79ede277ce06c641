"""Which axis of what is reduced lies innermost in memory, through views."""

from __future__ import annotations

import pytest

from torch_pruner import families
from torch_pruner.families.sweeps import innermost_axis
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

TARGET = TargetSpec.from_dict({"kind": "llvm", "mcpu": "x86-64-v4"}, 2)


def task(
    shape: tuple[int, ...], perm: tuple[int, ...], into: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[Task, int]:
    """The sum of an input that is permuted and reshaped, and what is summed."""
    b = GraphBuilder()
    viewed = b.reshape(b.permute(b.input(0, shape, "float32"), perm), into)
    kept = tuple(n for a, n in enumerate(into) if a not in axes)
    spec = b.finish([b.append("sum", (viewed,), kept, "float32", axes=axes)])
    return Task("sum", spec, TARGET, 2), viewed


@pytest.mark.parametrize(
    ("shape", "perm", "into", "innermost"),
    [
        ((1, 7, 7, 96), (0, 3, 1, 2), (96, 7, 7), 0),  # channels of one image
        ((1, 7, 7, 96), (0, 3, 1, 2), (96, 49), 0),
        ((2, 7, 7, 96), (0, 3, 1, 2), (192, 7, 7), 0),  # two axes became one
        ((2, 96, 7, 7), (0, 1, 2, 3), (192, 7, 7), 2),
        ((2, 96, 7, 7), (0, 1, 2, 3), (192, 49), 1),
        ((7, 96), (1, 0), (8, 12, 7), 1),  # one axis became two
        ((7, 96), (1, 0), (96, 7, 1), 0),
        ((6, 4), (0, 1), (4, 6), 1),
        ((1, 1, 5), (0, 1, 2), (5,), 0),
    ],
)
def test_through_a_reshape(
    shape: tuple[int, ...], perm: tuple[int, ...], into: tuple[int, ...], innermost: int
) -> None:
    given, viewed = task(shape, perm, into, (len(into) - 1,))
    assert innermost_axis(given.spec, viewed) == innermost


def test_statistics_of_one_image_have_a_channel_for_each_lane() -> None:
    given, _ = task((1, 7, 7, 96), (0, 3, 1, 2), (96, 7, 7), (1, 2))
    assert "lane_per_row" in {sketch.name for sketch in families.sketches_for(given)}
    rows, _ = task((1, 96, 7, 7), (0, 1, 2, 3), (96, 7, 7), (1, 2))
    assert "lane_per_row" not in {sketch.name for sketch in families.sketches_for(rows)}


def _reduced(b: GraphBuilder, x: int) -> tuple[int, int]:
    """The innermost axis of what is reduced, and the last one."""
    shape = b.shape(x)
    spec = b.finish([b.append("sum", (x,), shape[1:], "float32", axes=(0,))])
    return innermost_axis(spec, x), len(shape) - 1


def test_most_bytes_decide() -> None:
    b = GraphBuilder()
    across = b.permute(b.input(0, (40, 30, 20), "float32"), (2, 1, 0))
    near = [b.input(k, (20, 30, 40), "float32") for k in (1, 2)]
    product = b.pointwise("mul", across, near[0])
    assert _reduced(b, b.pointwise("mul", near[1], product)) == (2, 2)
    b = GraphBuilder()
    across = [b.permute(b.input(k, (40, 30, 20), "float32"), (2, 1, 0)) for k in (0, 1)]
    near_one = b.input(2, (20, 30, 40), "float32")
    assert _reduced(b, b.pointwise("mul", near_one, b.pointwise("mul", *across)))[0] == 0


def test_what_is_repeated_does_not_count() -> None:
    b = GraphBuilder()
    few = b.broadcast(b.input(0, (64, 64, 1), "float32"), (64, 64, 24))
    assert _reduced(b, b.pointwise("mul", few, b.input(1, (64, 64, 24), "float32"))) == (2, 2)
