"""DeepLab-V3 (Chen et al., 2017): a dilated ResNet-50, spatial pyramid pooling, upsampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models.blocks import ConvNorm
from benchmarks.models.resnet import bottleneck_trunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class PyramidPooling(nn.Module):
    """The same features seen at several dilations and once as their mean, joined and projected."""

    def __init__(self, inputs: int, outputs: int, rates: Sequence[int]) -> None:
        super().__init__()
        views: list[nn.Module] = [ConvNorm(inputs, outputs, 1)]
        views += [ConvNorm(inputs, outputs, 3, dilation=rate) for rate in rates]
        self.views = nn.ModuleList(views)
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvNorm(inputs, outputs, 1))
        self.project = ConvNorm(outputs * (len(views) + 1), outputs, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        mean = F.interpolate(self.mean(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
        seen = [view(x) for view in self.views]
        return self.dropout(self.project(torch.cat([*seen, mean], dim=1)))


class DeepLabV3(nn.Module):
    """Per-pixel class scores at the resolution of the input; the trunk's output stride is 8."""

    def __init__(self, classes: int = 21) -> None:
        super().__init__()
        self.trunk = bottleneck_trunk(dilated=(False, False, True, True))
        self.head = nn.Sequential(
            PyramidPooling(2048, 256, rates=(12, 24, 36)),
            ConvNorm(256, 256, 3),
            nn.Conv2d(256, classes, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(self.trunk(x))
        return F.interpolate(scores, size=x.shape[-2:], mode="bilinear", align_corners=False)
