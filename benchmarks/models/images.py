"""Networks that make something of every part of an image: a detector, a decoder of latents, mixers.

All are plain modules in the style of what their names say, with sizes given as arguments.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.blocks import RESIDUAL_GAIN, ConvNorm
from benchmarks.models.unet import GROUPS


def _conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> ConvNorm:
    return ConvNorm(inputs, outputs, kernel, stride=stride, act=nn.SiLU, eps=1e-3)


class SplitStage(nn.Module):
    """Half of the channels go through bottlenecks; all intermediate values are concatenated."""

    def __init__(self, inputs: int, outputs: int, depth: int, *, shortcut: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.enter = _conv(inputs, outputs)
        self.blocks = nn.ModuleList(
            nn.Sequential(_conv(half, half, 3), _conv(half, half, 3)) for _ in range(depth)
        )
        self.leave = _conv(half * (2 + depth), outputs)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.enter(x).chunk(2, dim=1))
        for block in self.blocks:
            made = block(parts[-1])
            parts.append(parts[-1] + made if self.shortcut else made)
        return self.leave(torch.cat(parts, dim=1))


class PoolPyramid(nn.Module):
    """Three max pools after one another, beside what went in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = _conv(width, width // 2), _conv(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.enter(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        return self.leave(torch.cat(parts, dim=1))


class Detector(nn.Module):
    """A one-stage detector of three scales as YOLOv8-n has it: boxes as distributions, classes."""

    def __init__(self, width: int = 16, classes: int = 80, bins: int = 16) -> None:
        super().__init__()
        w = [width * k for k in (1, 2, 4, 8, 16)]
        self.enter = nn.Sequential(_conv(3, w[0], 3, 2), _conv(w[0], w[1], 3, 2))
        self.stages = nn.ModuleList()
        for level, depth in enumerate((1, 2, 2, 1), start=1):
            down = nn.Identity() if level == 1 else _conv(w[level - 1], w[level], 3, 2)
            stage = SplitStage(w[level], w[level], depth, shortcut=True)
            self.stages.append(nn.Sequential(down, stage))
        self.pools = PoolPyramid(w[4])
        self.up = nn.ModuleList(
            SplitStage(w[k] + w[k + 1], w[k], 1, shortcut=False) for k in (3, 2)
        )
        self.smaller = nn.ModuleList(_conv(w[k], w[k], 3, 2) for k in (2, 3))
        self.down = nn.ModuleList(
            SplitStage(w[k] + w[k + 1], w[k + 1], 1, shortcut=False) for k in (2, 3)
        )
        self.boxes = nn.ModuleList(_head(n, w[2], 4 * bins) for n in w[2:])
        self.classes = nn.ModuleList(_head(n, classes, classes) for n in w[2:])
        self.register_buffer("bins", torch.arange(bins, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        _, small, middle, large = *levels[:3], self.pools(levels[3])
        middle = self.up[0](torch.cat([F.interpolate(large, scale_factor=2.0), middle], 1))
        small = self.up[1](torch.cat([F.interpolate(middle, scale_factor=2.0), small], 1))
        middle = self.down[0](torch.cat([self.smaller[0](small), middle], 1))
        large = self.down[1](torch.cat([self.smaller[1](middle), large], 1))
        scales = (small, middle, large)
        boxes = torch.cat([h(s).flatten(2) for h, s in zip(self.boxes, scales, strict=True)], 2)
        scores = torch.cat([h(s).flatten(2) for h, s in zip(self.classes, scales, strict=True)], 2)
        shares = boxes.unflatten(1, (4, -1)).softmax(2)
        sides = (shares * self.bins[:, None]).sum(2)
        return torch.cat([sides, scores.sigmoid()], dim=1)


def _head(inputs: int, width: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        _conv(inputs, width, 3), _conv(width, width, 3), nn.Conv2d(width, outputs, 1)
    )


class NormedBlock(nn.Module):
    """Two convolutions with group normalisation and SiLU before each, and a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, inputs), nn.Conv2d(inputs, outputs, 3, 1, 1)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, outputs), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(hidden)))


class PixelAttention(nn.Module):
    """One head of attention over all pixels, as wide as the image has channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width)
        self.parts, self.leave = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts(self.norm(x)).flatten(2).transpose(1, 2)[:, None].chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(*parts)[:, 0]
        return x + self.leave(mixed.transpose(1, 2).unflatten(2, x.shape[2:]))


class LatentDecoder(nn.Module):
    """The decoder of a variational autoencoder as latent diffusion has it, with fewer channels."""

    def __init__(self, widths: tuple[int, ...] = (256, 128, 64), depth: int = 2) -> None:
        super().__init__()
        now = widths[0]
        parts: list[nn.Module] = [nn.Conv2d(4, now, 3, 1, 1), NormedBlock(now, now)]
        parts += [PixelAttention(now), NormedBlock(now, now)]
        for level, width in enumerate(widths):
            for _ in range(depth):
                parts.append(NormedBlock(now, width))
                now = width
            if level + 1 < len(widths):
                parts += [nn.Upsample(scale_factor=2.0), nn.Conv2d(now, now, 3, 1, 1)]
        parts += [nn.GroupNorm(GROUPS, now), nn.SiLU(), nn.Conv2d(now, 3, 3, 1, 1)]
        self.parts = nn.Sequential(*parts)

    def forward(self, latents: Tensor) -> Tensor:
        return self.parts(latents)


class ConvMixerBlock(nn.Module):
    """A depthwise convolution around which a shortcut leads, then one of single pixels."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.space = nn.Conv2d(width, width, kernel, groups=width, padding=kernel // 2)
        self.channels = nn.Conv2d(width, width, 1)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + RESIDUAL_GAIN * self.norm1(F.gelu(self.space(x)))
        return self.norm2(F.gelu(self.channels(x)))


class ConvMixer(nn.Module):
    """ConvMixer (Trockman and Kolter, 2022): large depthwise kernels over patches."""

    def __init__(self, width: int = 384, depth: int = 8, kernel: int = 9, patch: int = 7) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, patch, stride=patch)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(ConvMixerBlock(width, kernel) for _ in range(depth)))
        self.leave = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.norm(F.gelu(self.enter(x))))
        return self.leave(x.mean((2, 3)))


class DiffusionBlock(nn.Module):
    """A transformer block whose normalisations are scaled and shifted by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.condition = nn.Linear(width, 6 * width)
        self.parts, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shifts = self.condition(F.silu(condition))[:, None].chunk(6, dim=-1)
        hidden = self.norm(x) * (1 + shifts[1]) + shifts[0]
        q, k, v = self.parts(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + shifts[2] * self.mixed(mixed)
        hidden = self.norm(x) * (1 + shifts[4]) + shifts[3]
        return x + shifts[5] * self.narrow(F.gelu(self.wide(hidden), approximate="tanh"))


class DiffusionTransformer(nn.Module):
    """DiT (Peebles and Xie, 2023): predicts the noise in latents from patches of two by two."""

    def __init__(self, width: int = 384, depth: int = 12, heads: int = 6, size: int = 32) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, width, 2, stride=2)
        self.places = nn.Parameter(torch.randn(1, (size // 2) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(1001, width)
        self.blocks = nn.ModuleList(DiffusionBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.condition, self.leave = nn.Linear(width, 2 * width), nn.Linear(width, 4 * 8)
        self.size = size

    def forward(self, latents: Tensor, step: Tensor, label: Tensor) -> Tensor:
        frequencies = torch.exp(-9.21 * torch.arange(128, device=step.device) / 128)
        angles = step[:, None] * frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.classes(label)
        x = self.enter(latents).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.condition(F.silu(condition))[:, None].chunk(2, dim=-1)
        x = self.leave(self.norm(x) * (1 + scale) + shift)
        side = self.size // 2
        return (
            x.unflatten(-1, (2, 2, 8))
            .unflatten(1, (side, side))
            .permute(0, 5, 1, 3, 2, 4)
            .flatten(4, 5)
            .flatten(2, 3)
        )


class VideoBlock(nn.Module):
    """An inverted bottleneck of X3D (Feichtenhofer, 2020): a depthwise filter over time, too."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = inputs * 2 + inputs // 4
        self.enter = nn.Sequential(nn.Conv3d(inputs, wide, 1, bias=False), nn.BatchNorm3d(wide))
        self.depth = nn.Sequential(
            nn.Conv3d(wide, wide, 3, (1, stride, stride), 1, groups=wide, bias=False),
            nn.BatchNorm3d(wide),
        )
        self.squeeze, self.excite = nn.Conv3d(wide, 16, 1), nn.Conv3d(16, wide, 1)
        self.leave = nn.Sequential(nn.Conv3d(wide, outputs, 1, bias=False), nn.BatchNorm3d(outputs))
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.depth(F.relu(self.enter(x)))
        gate = self.excite(F.relu(self.squeeze(hidden.mean((2, 3, 4), keepdim=True)))).sigmoid()
        hidden = self.leave(F.silu(hidden * gate))
        return x + RESIDUAL_GAIN * hidden if self.shortcut else hidden


class VideoNet(nn.Module):
    """Clips ``(batch, 3, frames, rows, columns)`` to 400 classes, in the manner of X3D-S."""

    def __init__(self, widths: tuple[int, ...] = (24, 48, 96, 192), depth: int = 3) -> None:
        super().__init__()
        self.space = nn.Conv3d(3, widths[0], (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False)
        self.time = nn.Conv3d(
            widths[0], widths[0], (5, 1, 1), padding=(2, 0, 0), groups=widths[0], bias=False
        )
        self.norm = nn.BatchNorm3d(widths[0])
        now, blocks = widths[0], []
        for width in widths:
            for k in range(depth):
                blocks.append(VideoBlock(now, width, 2 if k == 0 else 1))
                now = width
        self.blocks = nn.Sequential(*blocks)
        self.leave = nn.Linear(now, 400)

    def forward(self, clip: Tensor) -> Tensor:
        x = F.relu(self.norm(self.time(self.space(clip))))
        return self.leave(self.blocks(x).mean((2, 3, 4)))
