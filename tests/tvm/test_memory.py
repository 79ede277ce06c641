"""What a compiled graph holds beside the model: one packed copy of each weight, and it says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_pruner as tp
from torch_pruner.dynamo import static

pytestmark = pytest.mark.tvm


@torch.no_grad()
def test_one_copy_of_each_weight_is_held_and_reported(backend, monkeypatch):
    made = []
    original = static.StaticInputs._make

    def keep(self, *given):
        made.append(original(self, *given))
        return made[-1]

    monkeypatch.setattr(static.StaticInputs, "_make", keep)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(16, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 32)
    ).eval()
    compiled = backend.compile(net)
    x = torch.randn(2, 16, 8, 8)
    torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)
    weights = net[0].weight.nbytes + net[4].weight.nbytes
    (snapshot,) = made
    held = sum(t.nbytes for t in snapshot.kept)
    assert tp.last_report().weight_bytes == weights
    assert weights <= held < weights + 4096  # and the folded statistics
