"""Functions and modules that several tests compile."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def randn(*shape: int, **kw: Any) -> torch.Tensor:
    return torch.randn(*shape, **kw)


def leaf(*shape: int, **kw: Any) -> torch.Tensor:
    return torch.randn(*shape, **kw).requires_grad_()


class ConvNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


def conv_norm(seed: int = 0) -> ConvNorm:
    torch.manual_seed(seed)
    return ConvNorm()


def linear_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def in_place(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)


def by_data(model):
    for p in model.parameters():
        p.data = p.data + 1


def mlp(x, w):
    return torch.relu(x @ w) + 1


def qr_in_the_middle(x):
    q, r = torch.linalg.qr((x + 1) * 2)
    return q @ r + 1, q.relu()
