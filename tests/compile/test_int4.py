"""The option ``weight_bits=4``: one graph, rounded weights, changes of them, later processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_pruner as tp
from tests.compile.agreement import assert_equal

pytestmark = pytest.mark.tvm


class Layers(nn.Module):
    """Sizes of no whole group, of no whole vector, and a weight that is read in two ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 72)
        self.up, self.down = nn.Linear(72, 203), nn.Linear(203, 72)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        return nn.functional.linear(h + self.down(self.up(h).relu()), self.embed.weight)


def weight_bytes() -> int:
    """Of packed weights in the graphs of the last compilation."""
    report = tp.last_report()
    assert report is not None
    assert not report.ops_fallback
    return report.weight_bytes


def rounded(net: nn.Module) -> nn.Module:
    """The same with weights as the option rounds them, by the package's own arithmetic."""
    from torch_pruner.graph import nibbles

    for parameter in (net.embed.weight, net.up.weight, net.down.weight):
        w = parameter.detach().float().numpy().T
        scales = torch.from_numpy(nibbles.scales_of(w, 64)).bfloat16().float().numpy()
        words = nibbles.words_of(w, scales, 64)
        weights = nibbles.weights_of(words, scales, None, w.shape[0], 64)
        parameter.detach().copy_(torch.from_numpy(weights.T.copy()))
    return net


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_the_option_rounds_weights(backend, rows, dtype) -> None:
    net = Layers().eval().to(dtype)
    x = torch.arange(rows).reshape(1, rows)
    compiled = backend.compile(net, weight_bits=4)
    exact, got = net(x), compiled(x)
    off = (got - exact).abs().max() / exact.abs().max()
    assert 1e-3 < off < 0.3
    held = weight_bytes()
    assert held < 0.75 * sum(p.numel() for p in (net.embed.weight, net.up.weight, net.down.weight))
    embedded = net.embed.weight.clone()
    twin = rounded(Layers().eval().to(dtype))
    hidden = nn.functional.embedding(x, embedded)
    expected = nn.functional.linear(hidden + twin.down(twin.up(hidden).relu()), twin.embed.weight)
    wrong = (got - expected).abs().max() / expected.abs().max()
    assert wrong < (1e-5 if dtype is torch.float32 else 2e-2)


@torch.no_grad()
def test_weights_may_change(backend) -> None:
    net = Layers().eval()
    x = torch.tensor([[3, 1, 4]])
    compiled = backend.compile(net, weight_bits=4)
    compiled(x)
    net.up.weight.mul_(0.5)
    net.embed.weight.mul_(2.0)
    exact = net(x)
    assert (compiled(x) - exact).abs().max() / exact.abs().max() < 0.3
    net.load_state_dict({k: -v for k, v in net.state_dict().items()})
    exact = net(x)
    assert (compiled(x) - exact).abs().max() / exact.abs().max() < 0.3


def test_training_keeps_its_weights(backend) -> None:
    net, twin = Layers(), Layers()
    x = torch.tensor([[3, 1, 4]])
    compiled = backend.compile(net, weight_bits=4)
    assert_equal(compiled(x), twin(x))
