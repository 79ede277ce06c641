"""Programs of kernels whose results no cache holds: each thread sees what the others wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from torch_pruner.target import TargetSpec

pytestmark = pytest.mark.tvm

_FENCE = b"\x0f\xae\xf8"  # sfence


class Layers(nn.Module):
    """Convolutions, a residual and a linear layer: results whose lines are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 32, 1)
        self.third = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.last = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x).relu()
        z = self.third(self.second(y).relu()) + y
        return z, self.last(z.permute(0, 2, 3, 1)).softmax(-1)


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_read_what_others_wrote_past_the_caches(cold, monkeypatch, threads) -> None:
    detect = TargetSpec.detect
    monkeypatch.setattr(
        TargetSpec,
        "detect",
        staticmethod(lambda *given: replace(detect(*given), l3_bytes=64)),
    )
    model = Layers().eval()
    with torch.no_grad():
        compiled = cold.compile(model, threads=threads)
        for _ in range(5):
            x = torch.randn(2, 16, 20, 20)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    lines = detect(threads).is_x86 and detect(threads).vector_bytes == 64
    fences = sum(p.read_bytes().count(_FENCE) for p in cold.cache_dir.rglob("*.so"))
    assert (fences >= 3) == lines
