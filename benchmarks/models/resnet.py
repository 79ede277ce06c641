"""Residual networks: ResNet-18, ResNet-50, Wide-ResNet-50-2, and the trunk of DeepLab-V3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from benchmarks.models.blocks import RESIDUAL_GAIN, Classifier, ConvNorm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Residual(nn.Module):
    """``relu(branch(x) + shortcut(x))``; the shortcut is a 1x1 convolution where shapes differ."""

    def __init__(self, branch: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = ConvNorm(inputs, outputs, 1, stride=stride, act=None)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.branch(x) + self.shortcut(x))


def basic_block(inputs: int, width: int, stride: int) -> Residual:
    """Two 3x3 convolutions."""
    branch = nn.Sequential(
        ConvNorm(inputs, width, 3, stride=stride),
        ConvNorm(width, width, 3, act=None, gain=RESIDUAL_GAIN),
    )
    return Residual(branch, inputs, width, stride)


def bottleneck(
    inputs: int, width: int, outputs: int, stride: int, dilation: int, groups: int = 1
) -> Residual:
    """1x1 down to ``width``, 3x3 (with stride, dilation and groups), 1x1 up to ``outputs``."""
    branch = nn.Sequential(
        ConvNorm(inputs, width, 1),
        ConvNorm(width, width, 3, stride=stride, dilation=dilation, groups=groups),
        ConvNorm(width, outputs, 1, act=None, gain=RESIDUAL_GAIN),
    )
    return Residual(branch, inputs, outputs, stride)


def stem() -> nn.Sequential:
    """From 3 channels to 64 at a quarter of the resolution."""
    return nn.Sequential(
        ConvNorm(3, 64, 7, stride=2), nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
    )


def bottleneck_trunk(
    depths: Sequence[int] = (3, 4, 6, 3),
    *,
    widen: int = 1,
    groups: int = 1,
    dilated: Sequence[bool] = (False, False, False, False),
) -> nn.Sequential:
    """Stem and four stages of bottlenecks; 2048 channels come out.

    A dilated stage keeps its resolution: its stride becomes dilation, which its own first block
    does not yet need (it still sees the samples of the stage before).
    """
    stages: list[nn.Module] = [stem()]
    channels, dilation = 64, 1
    for stage, (depth, dilate) in enumerate(zip(depths, dilated, strict=True)):
        stride, first_dilation = (1 if stage == 0 else 2), dilation
        if dilate:
            dilation, stride = dilation * stride, 1
        base = 64 * 2**stage
        for block in range(depth):
            stages.append(
                bottleneck(
                    channels,
                    base * widen,
                    base * 4,
                    stride if block == 0 else 1,
                    first_dilation if block == 0 else dilation,
                    groups,
                )
            )
            channels = base * 4
    return nn.Sequential(*stages)


def resnet50() -> nn.Module:
    return nn.Sequential(bottleneck_trunk(), Classifier(2048))


def wide_resnet50_2() -> nn.Module:
    return nn.Sequential(bottleneck_trunk(widen=2), Classifier(2048))


def resnet18() -> nn.Module:
    blocks: list[nn.Module] = [stem()]
    channels = 64
    for stage in range(4):
        width = 64 * 2**stage
        blocks.append(basic_block(channels, width, 1 if stage == 0 else 2))
        blocks.append(basic_block(width, width, 1))
        channels = width
    return nn.Sequential(*blocks, Classifier(channels))
