"""Kernels for which ATen was faster: steps of a compiled graph, and kept, like all others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_pruner as tp

pytestmark = pytest.mark.tvm
OPTIONS = {"effort": "quick", "trials": 32, "threads": 1}


@pytest.fixture
def a_fast_library(monkeypatch):
    """ATen, said to take no time for what has a product in it, so that it wins on any machine."""

    def latency_s(_self, spec):
        products = any(node.op in ("matmul", "conv") for node in spec.nodes)
        return 1e-12 if products else None

    monkeypatch.setattr("torch_pruner.devices.aten.AtenVendor.latency_s", latency_s)
    # Nor is it spared where ours come close to what the processor can do.
    monkeypatch.setattr("torch_pruner.tuner.roofline.roofline_s", lambda task: 0.0)
    monkeypatch.setattr("torch_pruner.compiler.vendor.VENDOR_SWITCH_S", 0.0)
    monkeypatch.setattr("torch_pruner.compiler.vendor.VENDOR_SPIN_S", 0.0)


class Net(nn.Module):
    """Products whose operands are inputs, weights and what other kernels made, and an output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(8, 64, 3, padding=1)
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        x = torch.relu(self.conv(x)).mean((2, 3))
        hidden = self.up(torch.softmax(x, -1))
        return hidden, self.down(torch.tanh(hidden)) + x


def test_it_runs_in_the_graph_and_is_found_again(cold, a_fast_library) -> None:
    module = Net().eval()
    with torch.no_grad():
        for source in ("library", "cache"):
            torch._dynamo.reset()
            compiled = cold.compile(module, dynamic=False, **OPTIONS)
            for seed in range(2):
                torch.manual_seed(seed)
                x = torch.randn(32, 8, 7, 7)
                torch.testing.assert_close(compiled(x), module(x))
            tasks = tp.last_report().tasks
            assert sum(t.sketch == "library" for t in tasks) >= 3, tasks
            assert source in {t.source for t in tasks if t.sketch == "library"}
        module.up.weight.mul_(2)  # what it reads is the weight, and no copy of it
        torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.rotated(6)
def test_without_the_option_it_is_not_asked(cold, a_fast_library) -> None:
    module, x = Net().eval(), torch.randn(32, 8, 7, 7)
    with torch.no_grad():
        compiled = cold.compile(module, dynamic=False, library=False, **OPTIONS)
        torch.testing.assert_close(compiled(x), module(x))
    assert {t.source for t in tp.last_report().tasks} <= {"tuned", "untuned"}
