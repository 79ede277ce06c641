"""The noise predictor of latent diffusion as Stable Diffusion has it, with narrower channels.

Levels of residual blocks with the time step added in, attention over pixels and to a text in all
but the lowest level, and skips from the way down to the way up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

GROUPS = 32


class ResidualBlock(nn.Module):
    """Two convolutions with normalisation before them; the time step is added between them."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, inputs), nn.Conv2d(inputs, outputs, 3, 1, 1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, outputs), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = hidden + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(hidden)))


class Attention(nn.Module):
    """Multi-head attention of pixels to pixels, or to a text of another width."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(context, width, bias=False)
        self.value = nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x), self.key(context), self.value(context))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention to itself and to the text, and a gated feed-forward part, over all pixels."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.norm, self.enter = nn.GroupNorm(GROUPS, width), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.itself, self.text = Attention(width, width, heads), Attention(width, context, heads)
        self.gated, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.leave = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        rows, columns = x.shape[2:]
        hidden = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
        normed = self.norms[0](hidden)
        hidden = hidden + self.itself(normed, normed)
        hidden = hidden + self.text(self.norms[1](hidden), context)
        value, gate = self.gated(self.norms[2](hidden)).chunk(2, dim=-1)
        hidden = hidden + self.narrow(value * F.gelu(gate))
        return x + self.leave(hidden.transpose(1, 2).unflatten(2, (rows, columns)))


class Stage(nn.Module):
    """A residual block, and a transformer block where there are heads of attention."""

    def __init__(self, inputs: int, outputs: int, time: int, context: int, *, heads: int) -> None:
        super().__init__()
        self.block = ResidualBlock(inputs, outputs, time)
        self.attention = TransformerBlock(outputs, context, heads) if heads else None

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        x = self.block(x, time)
        return x if self.attention is None else self.attention(x, context)


class UNet(nn.Module):
    """Predicts the noise in latents ``(batch, 4, rows, columns)`` at a time step, given a text."""

    def __init__(
        self,
        widths: tuple[int, ...] = (128, 256, 512, 512),
        depth: int = 2,
        context: int = 768,
        heads: int = 8,
    ) -> None:
        super().__init__()
        self.first, time = widths[0], 4 * widths[0]
        self.embed = nn.Sequential(nn.Linear(self.first, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(4, self.first, 3, 1, 1)
        self.down, self.smaller = nn.ModuleList(), nn.ModuleList()
        self.up, self.larger = nn.ModuleList(), nn.ModuleList()
        last = len(widths) - 1
        skips, now = [self.first], self.first
        for level, width in enumerate(widths):
            for _ in range(depth):
                self.down.append(
                    Stage(now, width, time, context, heads=heads if level < last else 0)
                )
                now = width
                skips.append(now)
            if level < last:
                self.smaller.append(nn.Conv2d(now, now, 3, 2, 1))
                skips.append(now)
        self.middle = Stage(now, now, time, context, heads=heads)
        self.end = ResidualBlock(now, now, time)
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(depth + 1):
                inputs = now + skips.pop()
                self.up.append(
                    Stage(inputs, width, time, context, heads=heads if level < last else 0)
                )
                now = width
            if level > 0:
                self.larger.append(nn.Conv2d(now, now, 3, 1, 1))
        self.norm, self.leave = nn.GroupNorm(GROUPS, now), nn.Conv2d(now, 4, 3, 1, 1)
        self.depth = depth

    def forward(self, latents: Tensor, step: Tensor, context: Tensor) -> Tensor:
        time = self.embed(_waves(step, self.first))
        x = self.enter(latents)
        skips = [x]
        for k, stage in enumerate(self.down):
            x = stage(x, time, context)
            skips.append(x)
            level, within = divmod(k + 1, self.depth)
            if within == 0 and level <= len(self.smaller):
                x = self.smaller[level - 1](x)
                skips.append(x)
        x = self.end(self.middle(x, time, context), time)
        for k, stage in enumerate(self.up):
            x = stage(torch.cat([x, skips.pop()], dim=1), time, context)
            level, within = divmod(k + 1, self.depth + 1)
            if within == 0 and level <= len(self.larger):
                x = self.larger[level - 1](F.interpolate(x, scale_factor=2.0))
        return self.leave(F.silu(self.norm(x)))


def _waves(step: Tensor, width: int) -> Tensor:
    """Cosines and sines of a time step at falling frequencies: ``(batch, width)``."""
    at = torch.arange(width // 2, dtype=torch.float32, device=step.device)
    angles = step[:, None].float() * torch.exp(-math.log(10000.0) * at / (width // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
