"""MobileNet-V2 (Sandler et al., 2018) and MobileNet-V3-Large (Howard et al., 2019) at width 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

from benchmarks.models.blocks import RESIDUAL_GAIN, Classifier, ConvNorm

if TYPE_CHECKING:
    from torch import Tensor

STAGES = (  # expansion, output channels, blocks, stride of the first block
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)

LARGE = (  # kernel, width, output channels, squeezes, hard swish, stride
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)


class InvertedResidual(nn.Module):
    """Widen by a 1x1, filter each channel by a 3x3, narrow by a linear 1x1; add if shapes allow."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        width = inputs * expansion
        widen = [] if expansion == 1 else [ConvNorm(inputs, width, 1, act=nn.ReLU6)]
        self.branch = nn.Sequential(
            *widen,
            ConvNorm(width, width, 3, stride=stride, groups=width, act=nn.ReLU6),
            ConvNorm(width, outputs, 1, act=None),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        return x + y if self.adds else y


def mobilenet_v2() -> nn.Module:
    layers: list[nn.Module] = [ConvNorm(3, 32, 3, stride=2, act=nn.ReLU6)]
    channels = 32
    for expansion, outputs, blocks, stride in STAGES:
        for block in range(blocks):
            first_stride = stride if block == 0 else 1
            layers.append(InvertedResidual(channels, outputs, expansion, first_stride))
            channels = outputs
    layers += [ConvNorm(channels, 1280, 1, act=nn.ReLU6), Classifier(1280, dropout=0.2)]
    return nn.Sequential(*layers)


class SqueezeExcite(nn.Module):
    """Scales channels by what two small layers make of their means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        between = max(8, (width // 4 + 4) // 8 * 8)
        between += 8 if between < 0.9 * (width // 4) else 0
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze, self.excite = nn.Conv2d(width, between, 1), nn.Conv2d(between, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.excite(F.relu(self.squeeze(self.pool(x)))))


class InvertedResidualV3(nn.Module):
    """As ``InvertedResidual``, with one activation throughout and channels scaled where asked."""

    def __init__(self, inputs: int, row: tuple[int, int, int, bool, bool, int]) -> None:
        super().__init__()
        kernel, width, outputs, squeezes, hard_swish, stride = row
        act: type[nn.Module] = nn.Hardswish if hard_swish else nn.ReLU
        self.adds = stride == 1 and inputs == outputs
        self.branch = nn.Sequential(
            *([ConvNorm(inputs, width, 1, act=act)] if width != inputs else []),
            ConvNorm(width, width, kernel, stride=stride, groups=width, act=act),
            *([SqueezeExcite(width)] if squeezes else []),
            ConvNorm(width, outputs, 1, act=None, gain=RESIDUAL_GAIN if self.adds else 1.0),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        return x + y if self.adds else y


def mobilenet_v3_large() -> nn.Module:
    layers: list[nn.Module] = [ConvNorm(3, 16, 3, stride=2, act=nn.Hardswish)]
    channels = 16
    for row in LARGE:
        layers.append(InvertedResidualV3(channels, row))
        channels = row[2]
    layers += [ConvNorm(channels, 960, 1, act=nn.Hardswish), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers += [nn.Linear(960, 1280), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers)
