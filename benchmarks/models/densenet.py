"""DenseNet-121 (Huang et al., 2016)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.models.blocks import Classifier

if TYPE_CHECKING:
    from torch import Tensor

GROWTH = 32


def _norm_conv(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """Normalisation and activation come before the convolution in this family."""
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
    )


class DenseLayer(nn.Module):
    """Appends ``GROWTH`` channels, computed from all channels so far, to its input."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            _norm_conv(inputs, 4 * GROWTH, 1), _norm_conv(4 * GROWTH, GROWTH, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.branch(x)), dim=1)


def densenet121() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels, depths = 64, (6, 12, 24, 16)
    for stage, depth in enumerate(depths):
        for _ in range(depth):
            layers.append(DenseLayer(channels))
            channels += GROWTH
        if stage + 1 < len(depths):
            layers += [_norm_conv(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
    head = [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), Classifier(channels)]
    return nn.Sequential(*layers, *head)
