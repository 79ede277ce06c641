"""MobileNet-V2 (Sandler et al., 2018) at width 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from benchmarks.models.blocks import Classifier, ConvNorm

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
