"""Convolutions that the importer makes smaller before anything is tuned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.dynamo.running import check
from torch_pruner.dynamo.lower.aten.contractions import _live_offsets


def _contractions(capture, op: str) -> list[tuple[int, ...]]:
    """Shapes of the second operand of every ``op``."""
    graphs = [r.graph for part in capture.parts for r in part.regions]
    return [g.nodes[n.inputs[1]].shape for g in graphs for n in g.nodes if n.op == op]


def _picture(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("dilation", "kernel"), [(4, (3, 3)), (5, (1, 3)), (8, (1, 1)), (1, (3, 3))]
)
def test_offsets_that_only_meet_padding_are_left_out(dilation, kernel) -> None:
    conv = nn.Conv2d(4, 6, 3, padding=dilation, dilation=dilation)
    capture = check(conv, _picture(1, 4, 5, 7))
    assert _contractions(capture, "conv") == [(6, 4, *kernel)]


def test_live_offsets() -> None:
    assert _live_offsets(28, 28, 3, 1, 36, 36, 36) == (1, 1)
    assert _live_offsets(28, 28, 3, 1, 24, 24, 24) == (0, 3)
    assert _live_offsets(7, 4, 3, 2, 1, 1, 1) == (0, 3)
    assert _live_offsets(1, 1, 3, 1, 1, 1, 1) == (1, 1)
    assert _live_offsets(4, 2, 3, 4, 9, 9, 1) == (0, 3)  # nothing is read: left as it is


def test_a_transposed_convolution_of_one_pixel_is_a_product() -> None:
    capture = check(nn.ConvTranspose2d(6, 5, 4), _picture(2, 6, 1, 1))
    assert _contractions(capture, "conv_transpose") == []
    assert _contractions(capture, "matmul") == [(6, 4 * 4 * 5)]
    padded = nn.ConvTranspose2d(6, 5, 4, padding=1)
    assert _contractions(check(padded, _picture(2, 6, 1, 1)), "conv_transpose")


def test_a_transposed_convolution_of_one_tap_is_a_convolution() -> None:
    capture = check(nn.ConvTranspose2d(6, 5, 1), _picture(2, 6, 4, 3))
    assert _contractions(capture, "conv_transpose") == []
    assert _contractions(capture, "conv") == [(5, 6, 1, 1)]
    assert _contractions(
        check(nn.ConvTranspose2d(6, 4, 1, groups=2), _picture(2, 6, 4, 3)), "conv_transpose"
    )


@pytest.mark.parametrize(("stride", "more"), [(2, 0), (2, 1), ((1, 3), (0, 1)), (4, 3)])
def test_between_results_of_one_tap_are_zeros(stride, more) -> None:
    made = nn.ConvTranspose2d(6, 5, 1, stride=stride, output_padding=more)
    capture = check(made, _picture(2, 6, 4, 3))
    assert _contractions(capture, "conv_transpose") == []
    assert _contractions(capture, "conv") == [(5, 6, 1, 1)]


@pytest.mark.parametrize(
    ("made", "shape"),
    [
        (nn.ConvTranspose2d(6, 5, 3, stride=2, padding=1), (2, 6, 5, 4)),  # 9 by 7
        (nn.ConvTranspose2d(6, 5, 3, stride=(1, 3)), (1, 6, 4, 4)),
        (nn.ConvTranspose1d(4, 3, 5, stride=4, padding=1), (2, 4, 6)),
    ],
)
def test_sizes_that_a_stride_does_not_divide_are_rounded_up(made, shape) -> None:
    capture = check(made, _picture(*shape))
    graphs = [r.graph for part in capture.parts for r in part.regions]
    (found,) = [n for g in graphs for n in g.nodes if n.op == "conv_transpose"]
    assert not any(n % s for n, s in zip(found.shape[2:], made.stride, strict=True))


def test_dilated_and_grouped_ones_keep_their_sizes() -> None:
    for made in (
        nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, dilation=2),
        nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, groups=2),
    ):
        capture = check(made, _picture(2, 6, 5, 4))
        graphs = [r.graph for part in capture.parts for r in part.regions]
        (found,) = [n for g in graphs for n in g.nodes if n.op == "conv_transpose"]
        assert found.shape == made(_picture(2, 6, 5, 4)).shape
