"""Key/value caches that a compiled step writes into: right, in place, and checked once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compile.agreement import assert_equal

pytestmark = pytest.mark.tvm
LENGTH, WIDTH = 16, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.keys = torch.zeros(1, LENGTH, WIDTH)
        self.values = torch.zeros(1, LENGTH, WIDTH)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        self.keys.index_copy_(1, position, k)
        self.values[:, position] = v
        hidden = torch.arange(LENGTH) > position[:, None]
        scores = (q @ self.keys.transpose(1, 2)).masked_fill(hidden, float("-inf"))
        return x + scores.softmax(-1) @ self.values


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, position)
        return x


@pytest.mark.parametrize("check", ["first-call", "off"])
@torch.no_grad()
def test_steps_equal_eagers_and_write_into_the_cache(backend, check):
    net, twin = Decoder().eval(), Decoder().eval()
    compiled = backend.compile(net, dynamic=False, check=check)
    addresses = [t.data_ptr() for layer in net.layers for t in (layer.keys, layer.values)]
    for start, count in ((0, 4), (4, 1), (5, 1), (6, 1)):
        position = torch.arange(start, start + count)
        x = torch.randn(1, count, WIDTH)
        assert_equal(compiled(x, position), twin(x, position))
        for mine, theirs in zip(net.layers, twin.layers, strict=True):
            assert_equal(mine.keys, theirs.keys)
            assert_equal(mine.values, theirs.values)
    assert addresses == [t.data_ptr() for layer in net.layers for t in (layer.keys, layer.values)]


@torch.no_grad()
def test_a_step_copies_no_cache(backend):
    net = Decoder().eval()
    compiled = backend.compile(net, dynamic=False)
    x, position = torch.randn(1, 1, WIDTH), torch.tensor([0])
    compiled(x, position)
    with torch.profiler.profile(record_shapes=True) as profile:
        compiled(x, position + 1)
    cache = [1, LENGTH, WIDTH]
    copies = [e for e in profile.events() if e.name in ("aten::clone", "aten::index_copy")]
    assert not [e for e in copies if e.input_shapes and e.input_shapes[0] == cache]
    names = [e.name for e in profile.events()]
    assert names.count("aten::index_copy_") == 2
