"""Seven more networks, most of them in batches.

They are table 1 of "Enabling Tensor Language Model to Assist in Generating High-Performance Tensor
Programs for Deep Learning" (TLM, OSDI 2024).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from benchmarks.models import dcgan, densenet, resnet, transformer
from benchmarks.models.blocks import RESIDUAL_GAIN, Classifier
from benchmarks.models.network import Network, image_network, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class ConvNorm3d(nn.Module):
    """A convolution of clips without bias, batch normalisation, and relu where ``act``."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: tuple[int, int, int],
        stride: tuple[int, int, int] = (1, 1, 1),
        *,
        act: bool = True,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        padding = tuple(k // 2 for k in kernel)
        self.conv = nn.Conv3d(inputs, outputs, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm3d(outputs)
        self.act = nn.ReLU(inplace=True) if act else nn.Identity()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)) * self.gain)


class Residual3d(nn.Module):
    """Two 3x3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        step = (stride, stride, stride)
        self.branch = nn.Sequential(
            ConvNorm3d(inputs, width, (3, 3, 3), step),
            ConvNorm3d(width, width, (3, 3, 3), act=False, gain=RESIDUAL_GAIN),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = ConvNorm3d(inputs, width, (1, 1, 1), step, act=False)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.branch(x) + self.shortcut(x))


def resnet3d18() -> nn.Module:
    """R3D-18 (D. Tran et al., "A Closer Look at Spatiotemporal Convolutions", 2018)."""
    blocks: list[nn.Module] = [ConvNorm3d(3, 64, (3, 7, 7), (1, 2, 2))]
    channels = 64
    for stage in range(4):
        width = 64 * 2**stage
        blocks.append(Residual3d(channels, width, 1 if stage == 0 else 2))
        blocks.append(Residual3d(width, width, 1))
        channels = width
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(512, 400))


def resnext50() -> nn.Module:
    return nn.Sequential(resnet.bottleneck_trunk(widen=2, groups=32), Classifier(2048))


_BERT_LARGE = partial(transformer.bert, hidden=1024, heads=16, intermediate=4096)


def _images(
    name: str, title: str, builder: Callable[[], nn.Module], *shape: int, batch: int = 8
) -> Network:
    return image_network(name, title, builder, *shape, batches=(batch,), in_papers=False)


def _language(
    name: str, title: str, factory: Callable[[int, str], nn.Module], vocabulary: int, depth: int
) -> Network:
    inputs = tokens(vocabulary, 256)
    row = {"batches": (4,), "depth": depth, "kind": "language", "in_papers": False}
    return Network(name, f"{title}, 256 tokens", factory, inputs, **row)


NETWORKS: tuple[Network, ...] = (
    _images("resnext50", "ResNeXt-50", resnext50, 3, 224, 224, batch=1),
    _images("densenet121_256", "DenseNet-121, 256²", densenet.densenet121, 3, 256, 256),
    _images("wide_resnet50_256", "Wide-ResNet-50, 256²", resnet.wide_resnet50_2, 3, 256, 256),
    _images("resnet3d18", "ResNet3D-18", resnet3d18, 3, 16, 144, 144, batch=4),
    _images("dcgan_discriminator", "DCGAN discriminator", dcgan.discriminator, 3, 64, 64),
    _language("bert_large", "BERT-large", _BERT_LARGE, 30522, 24),
    _language("llama_256", "Llama (12 x 768)", transformer.llama, 32000, 12),
)
