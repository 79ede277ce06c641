"""Inception-V3 (Szegedy et al., 2015) for 299x299 images, without the auxiliary training head."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.models.blocks import Classifier, ConvNorm

if TYPE_CHECKING:
    from torch import Tensor

_Conv = partial(ConvNorm, eps=1e-3)


class Concat(nn.Module):
    """Runs every branch on the same input and joins the results along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _pooled(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _Conv(inputs, outputs, 1))


def _grid35(inputs: int, pooled: int) -> Concat:
    """35x35: 1x1, 5x5 and a pair of 3x3 (the paper's figure 5)."""
    return Concat(
        _Conv(inputs, 64, 1),
        nn.Sequential(_Conv(inputs, 48, 1), _Conv(48, 64, 5)),
        nn.Sequential(_Conv(inputs, 64, 1), _Conv(64, 96, 3), _Conv(96, 96, 3)),
        _pooled(inputs, pooled),
    )


def _reduce35(inputs: int) -> Concat:
    """35x35 to 17x17."""
    return Concat(
        _Conv(inputs, 384, 3, stride=2, padding=0),
        nn.Sequential(
            _Conv(inputs, 64, 1), _Conv(64, 96, 3), _Conv(96, 96, 3, stride=2, padding=0)
        ),
        nn.MaxPool2d(3, stride=2),
    )


def _grid17(inputs: int, width: int) -> Concat:
    """17x17: 7x7 convolutions factored into 1x7 and 7x1 (figure 6)."""
    row, col = (1, 7), (7, 1)
    return Concat(
        _Conv(inputs, 192, 1),
        nn.Sequential(_Conv(inputs, width, 1), _Conv(width, width, row), _Conv(width, 192, col)),
        nn.Sequential(
            _Conv(inputs, width, 1),
            _Conv(width, width, col),
            _Conv(width, width, row),
            _Conv(width, width, col),
            _Conv(width, 192, row),
        ),
        _pooled(inputs, 192),
    )


def _reduce17(inputs: int) -> Concat:
    """17x17 to 8x8."""
    return Concat(
        nn.Sequential(_Conv(inputs, 192, 1), _Conv(192, 320, 3, stride=2, padding=0)),
        nn.Sequential(
            _Conv(inputs, 192, 1),
            _Conv(192, 192, (1, 7)),
            _Conv(192, 192, (7, 1)),
            _Conv(192, 192, 3, stride=2, padding=0),
        ),
        nn.MaxPool2d(3, stride=2),
    )


def _grid8(inputs: int) -> Concat:
    """8x8: the widened banks of 1x3 and 3x1 (figure 7)."""

    def fork() -> Concat:
        return Concat(_Conv(384, 384, (1, 3)), _Conv(384, 384, (3, 1)))

    return Concat(
        _Conv(inputs, 320, 1),
        nn.Sequential(_Conv(inputs, 384, 1), fork()),
        nn.Sequential(_Conv(inputs, 448, 1), _Conv(448, 384, 3), fork()),
        _pooled(inputs, 192),
    )


def inception_v3() -> nn.Module:
    return nn.Sequential(
        _Conv(3, 32, 3, stride=2, padding=0),
        _Conv(32, 32, 3, padding=0),
        _Conv(32, 64, 3),
        nn.MaxPool2d(3, stride=2),
        _Conv(64, 80, 1),
        _Conv(80, 192, 3, padding=0),
        nn.MaxPool2d(3, stride=2),
        _grid35(192, 32),
        _grid35(256, 64),
        _grid35(288, 64),
        _reduce35(288),
        _grid17(768, 128),
        _grid17(768, 160),
        _grid17(768, 160),
        _grid17(768, 192),
        _reduce17(768),
        _grid8(1280),
        _grid8(2048),
        Classifier(2048, dropout=0.5),
    )
