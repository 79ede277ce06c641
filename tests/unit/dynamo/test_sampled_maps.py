"""Maps that a copy took apart before they are read at computed positions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tests.unit.dynamo.running import run
from torch_pruner.dynamo.capture.decompositions import decomposition_table
from torch_pruner.dynamo.lower.partition import Region, partition
from torch_pruner.dynamo.lower.sampled_maps import with_channels_together

IMAGES, HEADS, CHANNELS, SIZES = 2, 3, 4, (5, 6)


def of_heads(rows, at):
    """Rows of all heads as a map of each, as deformable attention reads them."""
    maps = rows.flatten(2).transpose(1, 2).reshape(IMAGES * HEADS, CHANNELS, *SIZES)
    return F.grid_sample(maps, at, align_corners=False)


def of_volumes(rows, at):
    maps = rows.flatten(2).transpose(1, 2).reshape(IMAGES * HEADS, CHANNELS, 5, 2, 3)
    return F.grid_sample(maps, at, align_corners=False)


def given(axes=2):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(IMAGES, 30, HEADS, CHANNELS, generator=generator)
    return rows, torch.randn(IMAGES * HEADS, *[3] * axes, axes, generator=generator)


def captured(function, *arguments):
    table = decomposition_table()
    return make_fx(function, decomposition_table=table, tracing_mode="fake")(*arguments)


@pytest.mark.parametrize(("function", "axes"), [(of_heads, 2), (of_volumes, 3)])
def test_are_read_as_they_lay(function, axes):
    arguments = given(axes)
    gm = captured(function, *arguments)
    together = with_channels_together(gm)
    assert together is not gm
    parts = partition(together)
    assert not parts.rejections
    assert [type(step) for step in parts.steps] == [Region]
    torch.testing.assert_close(run(together, parts, arguments), gm(*arguments))
    torch.testing.assert_close(together(*arguments), gm(*arguments))


def apart(rows, at):
    maps = rows.permute(0, 2, 3, 1).reshape(IMAGES * HEADS, CHANNELS, *SIZES)
    return F.grid_sample(maps.relu(), at, align_corners=False)


def turned_twice(rows, at):
    """The copy is of channels that lie apart already."""
    maps = rows.reshape(IMAGES, HEADS * CHANNELS, 30)[:, 1:9].reshape(4, CHANNELS, *SIZES)
    return F.grid_sample(maps, at[:4], align_corners=False)


@pytest.mark.parametrize("function", [apart, turned_twice])
def test_others_stay_as_they_are(function):
    gm = captured(function, *given())
    assert with_channels_together(gm) is gm
    assert [r.node.split(" ")[0] for r in partition(gm).rejections] == [
        "aten.grid_sampler_2d.default"
    ]


def test_of_other_dtypes_nothing_is_copied_for_eager():
    gm = captured(of_heads, *(t.double() for t in given()))
    assert with_channels_together(gm) is gm


def test_sizes_that_are_symbols_are_not_asked():
    """Asking would fix them."""

    def function(rows, at):
        n, count = rows.shape[:2]
        maps = rows.flatten(2).transpose(1, 2).reshape(n * HEADS, CHANNELS, count // 6, 6)
        return F.grid_sample(maps, at, align_corners=False)

    gm = make_fx(function, tracing_mode="symbolic")(*given())
    assert with_channels_together(gm) is gm
