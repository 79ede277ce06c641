"""Graphs that are cut otherwise than rules say give eager's numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_pruner.compiler import driver
from torch_pruner.graph.cuts import KINDS, NO_CUTS, Site

if TYPE_CHECKING:
    from torch_pruner.compiler.lowered import Lowered

pytestmark = pytest.mark.tvm


class Mixed(nn.Module):
    """Something of every kind: convolutions, shared elementwise work, attention, gates, sums of
    what lies across."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.second = nn.Conv2d(16, 32, 1)
        self.heads = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.gate, self.up = nn.Linear(32, 48), nn.Linear(32, 48, bias=False)
        self.down, self.both = nn.Linear(48, 32), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor, *far: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.silu(self.first(x))
        y = self.second(F.relu(self.depthwise(y)) + y).flatten(2).transpose(1, 2)
        q, k, v = (m(y).view(2, 64, 2, 16).transpose(1, 2) for m in self.heads)
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 64, 32) + y
        shifted = z * 1.25 - 0.5
        longer = (z * 0.75 + 0.5).abs() * z - 1.5
        gated = F.silu(self.gate(z)) * self.up(z)
        left, right = self.both(z.tanh()).chunk(2, -1)
        across = far[0].view(2, 120, 100).transpose(1, 2)
        return (
            self.down(gated),
            left * right.sigmoid(),
            shifted.relu(),
            shifted.abs(),
            longer.relu(),
            longer.neg(),
            (across * far[1] * far[2]).sum((0, 1)),
            across.sum((0, 1)),
        )


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Mixed().eval()


def sites_of(
    net: nn.Module, x: tuple[torch.Tensor, ...], options: dict[str, Any], cuts: dict[str, Any]
) -> tuple[tuple[Site, ...], int, tuple[torch.Tensor, ...]]:
    """The graph's sites, its kernels, and the result where it is cut as ``cuts[""]``."""
    torch.compiler.reset()
    with torch.no_grad():
        found = torch.compile(net, backend="pruner", options=options)(*x)
    lowered: Lowered = cuts["lowered"]
    return lowered.sites, len(lowered.workloads), found


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How graphs are cut, as if it were remembered; and what was lowered last."""
    given: dict[str, Any] = {"": NO_CUTS}
    lower = driver.Compiler.lower

    def seen(self: driver.Compiler, *args: Any) -> Lowered:
        given["lowered"] = lower(self, *args)
        return given["lowered"]

    monkeypatch.setattr(driver, "remembered_cuts", lambda *_: given[""])
    monkeypatch.setattr(driver.Compiler, "lower", seen)
    return given


@pytest.mark.parametrize("threads", [1, 2])
def test_every_kind_of_cut(
    net: nn.Module, cuts: dict[str, Any], tmp_path: Any, threads: int
) -> None:
    near = (torch.randn(2, 100, 120) for _ in range(2))
    x = torch.randn(2, 3, 8, 8), torch.randn(240, 100), *near
    options = {"cache_dir": str(tmp_path), "effort": "none", "threads": threads, "strict": True}
    with torch.no_grad():
        wanted = net(*x)
    sites, usual, found = sites_of(net, x, options, cuts)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    kinds = {site.kind for site in sites}
    assert kinds == set(KINDS)
    counts = {}
    for kind in sorted(kinds):
        cuts[""] = frozenset(site for site in sites if site.kind == kind)
        _, counts[kind], found = sites_of(net, x, options, cuts)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert counts["joined"] == usual - 2, "two products for five, and a gate of its own"
    assert counts["split"] == usual, "two products, the second with what follows them"
    assert counts["apart"] > usual
    assert counts["parts"] > usual
    assert counts["turned"] == usual - 1, "the sums read across"
