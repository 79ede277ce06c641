"""Norms that train under autocast: a half input beside float32 parameters."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.tvm


class OfRows(nn.LayerNorm):
    """A layer norm of each position's channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = super().forward(x.flatten(2).transpose(1, 2))
        return rows.transpose(1, 2).reshape(x.shape)


NORMS = {
    "batch": nn.BatchNorm2d,
    "group": partial(nn.GroupNorm, 4),
    "layer": OfRows,
    "layer, no bias": partial(OfRows, bias=False),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_step_under_autocast_is_eagers_within_bfloat16(norm, tmp_path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, bias=False), norm(16), nn.ReLU(),
        nn.Conv2d(16, 16, 1, bias=False), norm(16),
    )  # fmt: skip
    x, towards = torch.randn(4, 8, 10, 10), torch.randn(4, 16, 10, 10)
    options = {"effort": "none", "strict": True, "cache_dir": str(tmp_path)}
    found = []
    for compiles in (False, True):
        own = copy.deepcopy(net)
        run = torch.compile(own, backend="pruner", options=options) if compiles else own
        given = x.clone().requires_grad_()
        for _ in range(3):
            own.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                y = run(given)
            (y.float() * towards).mean().backward()
        grads = [p.grad for p in own.parameters()]
        found.append([y, given.grad, *grads, *own.buffers()])
    for ours, eager in zip(found[1], found[0], strict=True):
        assert ours.dtype == eager.dtype
        scale = eager.float().abs().max() + 1e-6
        assert (ours.float() - eager.float()).abs().max() <= 0.06 * scale
