"""Blocks that are taken apart and summed again, and maxima over windows of an asked number."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.dynamo.running import Capture, check, check_training

WINDOWS = [  # kernel, dilation, padding, stride
    (3, 1, 1, 2),
    (3, 1, 1, 1),
    (2, 1, 0, 2),
    ((3, 2), 1, (2, 0), (1, 3)),
    (5, 1, 2, 2),
    (2, 1, 0, 3),
    (3, 2, 2, 2),
    ((2, 3), (3, 1), (1, 0), (1, 2)),
]


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("size", [(8, 6), (7, 9)], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_fold_is_compiled(window, size):
    blocks = F.unfold(x(2, 3, *size), *window)
    capture = check(lambda v: F.fold(v + 0, size, *window), blocks)
    assert not capture.rejected
    assert not check(lambda v: F.fold(v + 0, size, *window), blocks[0]).rejected


def test_fold_sums_half_precision_in_float32():
    """Eager rounds every sum."""

    def fold(v):
        return F.fold(v + 0, (8, 8), 5, 1, 2, 1)

    blocks = x(1, 2 * 25, 64, dtype=torch.bfloat16)
    capture = Capture()
    with torch.no_grad():
        actual = torch.compile(fold, backend=capture, dynamic=False)(blocks)
    assert not capture.rejected
    assert torch.equal(actual, fold(blocks.double()).bfloat16())


def test_blocks_that_do_not_overlap_are_only_moved():
    capture = check(lambda v: F.fold(v * 2, (8, 6), 2, stride=2), x(2, 12, 12))
    assert "take" not in str(capture.parts[0].regions)


def test_fold_of_strongly_overlapping_blocks_is_eagers():
    capture = check(lambda v: F.fold(v + 0, (70, 1), (40, 1)), x(1, 40, 31))
    assert "col2im" in str(capture.rejected)


class Loss(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.scale, self.fn = nn.Parameter(torch.ones(())), fn

    def forward(self, v):
        return self.fn(v * self.scale).square().mean()


@pytest.mark.parametrize("window", WINDOWS[:2], ids=str)
def test_gradients_of_unfold_and_fold(window):
    assert not check_training(Loss(lambda v: F.unfold(v, *window)), x(2, 3, 8, 6)).rejected
    blocks = F.unfold(x(2, 3, 8, 6), *window)
    assert not check_training(Loss(lambda v: F.fold(v, (8, 6), *window)), blocks).rejected


@pytest.mark.parametrize("size", [1, 4, (2, 3), (3, 5), (None, 7), (8, 9)], ids=str)
def test_adaptive_maxima(size):
    assert not check(lambda v: F.adaptive_max_pool2d(v + 0, size), x(2, 4, 8, 9)).rejected


def test_adaptive_maxima_of_other_ranks_and_no_numbers():
    assert not check(lambda v: F.adaptive_max_pool1d(v + 0, 5), x(2, 4, 13)).rejected
    assert not check(lambda v: F.adaptive_max_pool3d(v + 0, (2, 3, 2)), x(2, 4, 4, 5, 6)).rejected
    some = x(2, 4, 7, 7)
    some[0, 1, 3, 3] = torch.nan
    assert not check(lambda v: F.adaptive_max_pool2d(v + 0, 3), some).rejected


def test_positions_of_adaptive_maxima():
    def positions(v, size):
        return F.adaptive_max_pool2d(v + 0, size, return_indices=True)

    assert not check(positions, x(2, 4, 8, 9), size=(4, 3)).rejected
    assert "adaptive_max_pool2d" in str(check(positions, x(2, 4, 8, 9), size=(3, 3)).rejected)


def test_gradients_of_adaptive_maxima():
    assert not check_training(
        Loss(lambda v: F.adaptive_max_pool2d(v, (4, 3))), x(2, 4, 8, 9)
    ).rejected
    # Windows of several sizes are eager's, forward and backward.
    check_training(Loss(lambda v: F.adaptive_max_pool2d(v, (3, 3))), x(2, 4, 8, 9))
