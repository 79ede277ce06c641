"""Quantised weights as torchao makes them: one graph, eager's results, and no floats are kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_pruner as tp
from tests.compile.agreement import assert_equal

pytestmark = pytest.mark.tvm
aten = torch.ops.aten


def held() -> int:
    """Bytes of packed weights of the last compilation, of which nothing was left to eager."""
    report = tp.last_report()
    assert report is not None
    assert not report.ops_fallback
    return report.weight_bytes


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[expected.dtype]
    assert got.dtype == expected.dtype
    assert (got - expected).abs().max() <= limit * expected.abs().max()


class Packed(nn.Module):
    """Weights of four bits in torch's own format for CPUs, with zeros."""

    def __init__(self, columns: int, depth: int, group: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = group
        numbers = torch.randint(0, 16, (columns, depth), dtype=torch.int32)
        self.register_buffer("packed", aten._convert_weight_to_int4pack_for_cpu(numbers, 1))
        both = torch.rand(depth // group, columns, 2) / 50
        self.register_buffer("scales", both.to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return aten._weight_int4pack_mm_for_cpu(rows, self.packed, self.group, self.scales).relu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "group"), [(1, 144, 128, 64), (5, 48, 96, 32), (40, 64, 256, 128)]
)
@torch.no_grad()
def test_torch_format_of_four_bits(backend, rows, columns, depth, group, dtype) -> None:
    torch.manual_seed(0)
    net = Packed(columns, depth, group, dtype)
    compiled, x = backend.compile(net, fullgraph=True), torch.randn(rows, depth, dtype=dtype)
    assert_near(compiled(x), net(x))
    assert held() < 0.8 * columns * depth + 4096
    net.scales.mul_(2)
    assert_near(compiled(x), net(x))


@torch.no_grad()
def test_live_weights_of_four_bits(backend) -> None:
    torch.manual_seed(0)
    net, x = Packed(144, 64, 32, torch.float32), torch.randn(3, 64)
    compiled = backend.compile(net, weights="live")
    assert_near(compiled(x), net(x))
    net.packed.data.view(-1)[7] ^= 0x35
    assert_near(compiled(x), net(x))
    assert held() == 0


class Grouped(nn.Module):
    """int8 with a scale and a zero for every group."""

    def __init__(self, columns: int, depth: int, group: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.groups = depth // group
        self.register_buffer("q", torch.randint(-8, 8, (columns, depth), dtype=torch.int8))
        self.register_buffer("s", (torch.rand(columns, self.groups, 1) / 50).to(dtype))
        self.register_buffer("z", torch.randint(-3, 3, (columns, self.groups, 1), dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = self.q.reshape(len(self.q), self.groups, -1)
        wide = (numbers.to(self.s.dtype) - self.z.to(self.s.dtype)) * self.s
        return nn.functional.linear(x, wide.reshape(self.q.shape))


@pytest.mark.parametrize("rows", [1, 40])
@torch.no_grad()
def test_bytes_by_groups(backend, rows) -> None:
    torch.manual_seed(0)
    net, x = Grouped(65, 192, 64, torch.float32), torch.randn(rows, 192)
    compiled = backend.compile(net, fullgraph=True)
    assert_near(compiled(x), net(x))
    assert held() < 2 * net.q.numel() + 4096
    net.q.neg_()
    assert_near(compiled(x), net(x))


@pytest.mark.parametrize("first", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(1, 64, 48), (5, 130, 33), (17, 67, 16), (70, 256, 80)])
@torch.no_grad()
def test_products_of_bytes_are_exact(backend, shape, first) -> None:
    """Among them the largest products that there are."""
    rows, depth, columns = shape
    random = torch.Generator().manual_seed(0)
    limits = torch.iinfo(first)
    a = torch.randint(limits.min, limits.max + 1, (rows, depth), generator=random).to(first)
    a[0] = limits.max
    w = torch.randint(-128, 128, (columns, depth), dtype=torch.int8, generator=random)
    w[0], w[1] = -128, 127
    net = nn.Module()
    net.register_buffer("w", w)
    net.forward = lambda a: torch._int_mm(a, net.w.t()) + 1
    exact = a.int() @ w.t().int() + 1
    assert_equal(backend.compile(net, fullgraph=True)(a), exact)
    assert not tp.last_report().ops_fallback


@torch.no_grad()
def test_sizes_that_vary(backend) -> None:
    torch.manual_seed(0)
    net = Packed(80, 128, 64, torch.float32)
    compiled = backend.compile(net, dynamic=True)
    for rows in (12, 9, 5, 12):
        x = torch.randn(rows, 128)
        assert_near(compiled(x), net(x))
