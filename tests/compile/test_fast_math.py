"""``fast_math`` as users see it: near eager's results, and nothing of it where it is not asked for.

What is rounded is up to the processor, so bounds are those of bfloat16 operands everywhere.
"""

from __future__ import annotations

import copy
import math
import platform

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_pruner

pytestmark = pytest.mark.tvm

BOUND = 2.0**-6  # of the largest element: two operands, each off by 2**-9, in several layers


class Block(nn.Module):
    """Attention with a mask, then two linear layers with GELU between."""

    def __init__(self, width: int = 64, heads: int = 2):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.body = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.body(self.norm(x))


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def inputs(length: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.zeros(2, 1, length, length)
    mask[1, :, :, length // 2 :] = -math.inf
    return torch.randn(2, length, 64), mask


def test_results_are_near_eagers(backend):
    torch.manual_seed(0)
    block, given = Block(), inputs()
    with torch.no_grad():
        want = block(*given)
        assert worst(backend.compile(block, fast_math=True)(*given), want) < BOUND
        exact = backend.compile(copy.deepcopy(block))(*given)
    assert worst(exact, want) < 1e-5


def test_what_is_masked_counts_nothing(backend):
    """exp(-inf) is 0: keys behind a mask may hold anything finite."""

    def attention(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v = (torch.randn(1, 2, 40, 32) for _ in range(3))
    mask = torch.zeros(40, 40)
    mask[:, 30:] = -math.inf
    compiled = backend.compile(attention, fast_math=True)
    first = compiled(q, k, v, mask)
    assert worst(first, attention(q, k, v, mask)) < BOUND
    v[:, :, 30:] = 1e30
    torch.testing.assert_close(compiled(q, k, v, mask), first, rtol=0, atol=0)


def test_rows_of_a_softmax_still_sum_to_one(backend):
    x = torch.randn(7, 130) * 10
    x[3, 5:] = -math.inf
    y = backend.compile(lambda t: torch.softmax(t, -1), fast_math=True)(x)
    torch.testing.assert_close(y.sum(-1), torch.ones(7))
    assert not y[3, 5:].any()
    torch.testing.assert_close(y, torch.softmax(x, -1), rtol=2.0**-12, atol=0)


def test_gradients_are_near_eagers(backend):
    torch.manual_seed(0)
    mine, given = Block(), inputs()
    twin = copy.deepcopy(mine)
    backend.compile(mine, fast_math=True)(*given).square().mean().backward()
    twin(*given).square().mean().backward()
    for (name, p), q in zip(mine.named_parameters(), twin.parameters(), strict=True):
        assert worst(p.grad, q.grad) < 2 * BOUND, name


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(8, 24, 3, padding=1), nn.Conv2d(16, 24, 1)], ids=["3x3", "1x1"]
)
def test_convolutions_are_near_eagers(backend, layer):
    x = torch.randn(2, layer.in_channels, 14, 14)
    with torch.no_grad():
        assert worst(backend.compile(layer, fast_math=True)(x), layer(x)) < BOUND


def test_kernels_of_the_option_and_of_the_default_are_kept_apart(backend, tmp_path):
    """Kernels and libraries of one are no answer for the other, whichever came first."""
    layer, x = nn.Linear(64, 64), torch.randn(32, 64)
    with torch.no_grad():
        first = backend.compile(copy.deepcopy(layer), cache_dir=str(tmp_path))(x)
        backend.compile(copy.deepcopy(layer), cache_dir=str(tmp_path), fast_math=True)(x)
        again = backend.compile(copy.deepcopy(layer), cache_dir=str(tmp_path))(x)
    torch.testing.assert_close(again, first, rtol=0, atol=0)


@pytest.mark.parametrize("size", [(56, 56), (30, 27)])
def test_convolutions_of_three_taps_are_off_by_what_is_said(backend, size):
    """docs/kernels.md: 5.5e-6 of the largest result for a layer. Sizes that tiles do not divide."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(), nn.Conv2d(64, 32, 3, 1, 0), nn.ReLU()]
    body, x = nn.Sequential(*layers), torch.randn(1, 64, *size)
    # Without instructions for bfloat16, by which products would be rounded instead.
    target = {"kind": "llvm", "mcpu": "haswell"} if platform.machine() == "x86_64" else "auto"
    with torch.no_grad():
        want = copy.deepcopy(body).double()(x.double())
        got = backend.compile(body, fast_math=True, target=target)(x)
    assert worst(got.double(), want) < 2 * 5.5e-6
    used = [task.sketch for task in torch_pruner.last_report().tasks]
    assert "winograd4" in used
    assert "winograd4" not in _used_without(backend, copy.deepcopy(body), x)


def _used_without(backend, body, x):
    with torch.no_grad():
        backend.compile(body)(x)
    return [task.sketch for task in torch_pruner.last_report().tasks]
