"""What a compiled graph holds beside the model: one packed copy of each weight, and it says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import torch_pruner as tp
from torch_pruner.dynamo.run import packed_inputs

pytestmark = pytest.mark.tvm


@torch.no_grad()
def test_one_copy_of_each_weight_is_held_and_reported(backend, monkeypatch):
    made = []
    original = packed_inputs.PackedInputs._make

    def keep(self, *given):
        made.append(original(self, *given))
        return made[-1]

    monkeypatch.setattr(packed_inputs.PackedInputs, "_make", keep)
    torch.manual_seed(0)
    net = (
        nn.Sequential(  # of 13 channels no kernel transforms the weights, which makes more of them
            nn.Conv2d(13, 32, 5),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 32),
        ).eval()
    )
    compiled = backend.compile(net)
    x = torch.randn(32, 13, 8, 8)  # a product of few rows may read its weights where they lie
    torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)
    weights = net[0].weight.nbytes + net[4].weight.nbytes
    (snapshot,) = made
    held = sum(t.nbytes for t in snapshot.kept)
    assert tp.last_report().weight_bytes == weights
    assert weights <= held < weights + 4096  # and the folded statistics


FIRST_CALL = r"""
import re, sys, torch

def status(name):
    found = re.search(rf"^{name}:\s+(\d+) kB$", open("/proc/self/status").read(), re.M)
    return int(found[1]) << 10

def add(x, y):
    return x.t() + y

torch.set_grad_enabled(False)
options = {"effort": "none", "strict": True}
compiled = torch.compile(add, backend="pruner", dynamic=False, options=options)
for n in (64, 96):  # whatever compiling loads is there, for both
    compiled(torch.randn(n, n), torch.randn(n, n))
before, n = status("VmRSS"), 8000
x, y = torch.randn(n, n), torch.randn(n, n)
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
out = (compiled if sys.argv[1] == "pruner" else add)(x, y)
print(status("VmHWM") - before)
"""


@pytest.mark.rotated(6)
def test_the_first_call_needs_little_more_memory_than_eager(tmp_path):
    """Eager's results lay beside ours, and both as double: three times of what eager needs."""

    def peak(backend: str) -> int:
        env = {**os.environ, "TORCH_PRUNER_CACHE_DIR": str(tmp_path / backend)}
        child = [sys.executable, "-c", FIRST_CALL, backend]
        run = subprocess.run(child, check=True, capture_output=True, text=True, env=env)
        return int(run.stdout)

    eager = peak("eager")
    assert eager > 3 * 8000 * 8000 * 4
    assert peak("pruner") <= 1.1 * eager + (16 << 20)  # what comparing loads and reads at a time
