"""How often the threads meet in a decoded layer: what phases are for (``graph/phases.py``)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_pruner
from tests.compile.agreement import assert_equal
from torch_pruner.compiler.driver import Compiler
from torch_pruner.graph.attention import any_attention

pytestmark = pytest.mark.tvm
HEADS, HIDDEN, WIDE, LENGTH = 8, 512, 1536, 256


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding."""
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat((-two, one), -1) * sin


class Layer(nn.Module):
    """A layer as Llama has it, its keys and values in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.q, self.k, self.v, self.o = (linear(HIDDEN, HIDDEN) for _ in range(4))
        self.gate, self.up = linear(HIDDEN, WIDE), linear(HIDDEN, WIDE)
        self.down = linear(WIDE, HIDDEN)
        shape = (1, HEADS, LENGTH, HIDDEN // HEADS)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(
        self, x: torch.Tensor, at: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (self.heads(of(y)) for of in (self.q, self.k, self.v))
        self.keys.index_copy_(2, at, turned(k, cos, sin))
        self.values.index_copy_(2, at, v)
        seen = torch.arange(LENGTH) <= at[:, None]
        mixed = nn.functional.scaled_dot_product_attention(
            turned(q, cos, sin), self.keys, self.values, attn_mask=seen
        )
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        angles = at[:, None] / torch.arange(1.0, 1 + HIDDEN // HEADS)
        for layer in self.layers:
            x = layer(x, at, angles.cos(), angles.sin())
        return x


@torch.no_grad()
def test_a_decoded_layer_has_five_barriers(backend, monkeypatch) -> None:
    """With its attention as one kernel, which is a matter of estimates; three meet once more."""
    monkeypatch.setattr(Compiler, "_few_queries", lambda _: any_attention)
    met = []
    for layers in (1, 2):
        net, twin = Decoder(layers).eval(), Decoder(layers).eval()
        compiled = backend.compile(net, dynamic=False, threads=2)
        for at in range(3):
            x = torch.randn(1, 1, HIDDEN)
            assert_equal(compiled(x, torch.tensor([at])), twin(x, torch.tensor([at])))
        report = torch_pruner.last_report()
        assert report is not None
        met.append(report.barriers)
    assert met[1] - met[0] <= 5
