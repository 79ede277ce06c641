"""DCGAN (Radford et al., 2015): a generator of 64x64 images, and what tells them from others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


class Generator(nn.Module):
    """One transposed convolution from 1x1 to 4x4, then four that double the extent."""

    def __init__(self, latent: int = 100, width: int = 64, channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = latent
        for step, factor in enumerate((8, 4, 2, 1)):
            stride, padding = (1, 0) if step == 0 else (2, 1)
            outputs = width * factor
            layers += [
                nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
            inputs = outputs
        layers += [nn.ConvTranspose2d(inputs, channels, 4, 2, 1, bias=False), nn.Tanh()]
        self.layers = nn.Sequential(*layers)

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z[:, :, None, None])


def discriminator(channels: int = 3, width: int = 64) -> nn.Module:
    """A 64x64 image to how likely it is a photograph: four convolutions that halve the extent."""
    layers: list[nn.Module] = []
    inputs = channels
    for step, factor in enumerate((1, 2, 4, 8)):
        layers.append(nn.Conv2d(inputs, width * factor, 4, 2, 1, bias=False))
        if step:
            layers.append(nn.BatchNorm2d(width * factor))
        layers.append(nn.LeakyReLU(0.2, inplace=True))
        inputs = width * factor
    return nn.Sequential(*layers, nn.Conv2d(inputs, 1, 4, bias=False), nn.Sigmoid(), nn.Flatten())
