"""Convolutions to few channels, and results so large that their memory is used again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_pruner.dynamo.run.recycled import LEAST_BYTES

pytestmark = pytest.mark.tvm


@pytest.mark.parametrize(
    ("last", "shape"),
    [
        (nn.Conv2d(32, 3, 3, padding=1), (1, 32, 33, 40)),
        (nn.Conv2d(16, 1, 5, padding=2, dilation=1), (2, 16, 20, 21)),
        (nn.ConvTranspose2d(32, 3, 4, 2, 1), (2, 32, 16, 15)),
        (nn.Conv1d(32, 2, 9, padding=4), (2, 32, 301)),
    ],
    ids=["3x3", "5x5", "transposed", "1d"],
)
def test_results_are_eagers(backend, last, shape):
    net = nn.Sequential(last, nn.Tanh()).eval()
    with torch.no_grad():
        run = backend.compile(net)
        for _ in range(3):
            x = torch.randn(shape)
            torch.testing.assert_close(run(x), net(x), rtol=1e-4, atol=1e-5)


def test_a_step_of_training_is_eagers(backend):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))
    backend.check_module(net, lambda: (torch.randn(2, 8, 20, 20),))


def test_large_results_are_right_held_or_not(backend):
    run = backend.compile(lambda x: x * 2 + 1)
    x = torch.arange(LEAST_BYTES // 4 + 64, dtype=torch.float32)
    held = run(x)
    again = run(-x)
    assert again.data_ptr() != held.data_ptr()
    at = again.data_ptr()
    del again
    third = run(x + 1)
    assert third.data_ptr() == at, "nobody had it"
    assert torch.equal(held, x * 2 + 1)
    assert torch.equal(third, (x + 1) * 2 + 1)
