"""Weights of eight bits: kernels that read them, modules that hold them, the option that rounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_pruner as tp
from tests.compile.agreement import assert_equal
from tests.emitting import schedule
from tests.families import kernels as K
from torch_pruner.families.contraction.space import ContractionSketch
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

pytestmark = pytest.mark.tvm


def product(rows: int, columns: int, depth: int, dtype: str = "float32") -> Graph:
    b = GraphBuilder()
    x = b.input(0, (rows, depth), dtype)
    q = b.input(1, (columns, depth), "int8", static=True)
    s = b.input(2, (columns,), "float32", static=True)
    total = b.append("matmul", (x, b.permute(q, (1, 0))), (rows, columns), "float32")
    return b.finish([b.cast(b.pointwise("relu", b.pointwise("mul", total, s)), dtype)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 256, 128), (1, 65, 100), (5, 48, 33), (40, 130, 96)])
def test_points_of_the_space(shape: tuple[int, int, int], dtype: str) -> None:
    """Drafts and points far from them, at sizes that divide and sizes that do not."""
    spec = product(*shape, dtype)
    points = K.points(ContractionSketch(Task("int8", spec, TargetSpec.detect(2), 2)), 5)
    for decisions in points:
        outputs, expected, _ = K.run(spec, "contraction", decisions)
        assert K.error(outputs, expected) < (1e-5 if dtype == "float32" else 1e-2)
    pack = schedule(spec, "contraction", points[0]).packs[1]
    assert pack is not None
    assert pack.nbytes < 2 * shape[1] * shape[2] + 64 * shape[2], "a byte for each weight"


def weight_bytes() -> int:
    """Of packed weights in the graphs of the last compilation."""
    report = tp.last_report()
    assert report is not None
    return report.weight_bytes


class Rounded(nn.Module):
    """As users of weight-only quantization have it."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.register_buffer("q", torch.randint(-127, 128, (width, width), dtype=torch.int8))
        self.register_buffer("s", torch.rand(width, 1) / 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.q.to(x.dtype) * self.s.to(x.dtype)).relu()


@pytest.mark.parametrize("rows", [1, 40])
@torch.no_grad()
def test_a_module_with_int8_weights(backend, rows):
    torch.manual_seed(0)
    net = Rounded()
    compiled = backend.compile(net)
    x = torch.randn(rows, 96)
    assert_equal(compiled(x), net(x))
    assert weight_bytes() < 2 * 96 * 96
    net.q.neg_()
    net.s.mul_(2)
    assert_equal(compiled(x), net(x))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        return nn.functional.linear(h + self.down(self.up(h).relu()), self.embed.weight)


@torch.no_grad()
def test_the_option_rounds_weights(backend):
    net = Layers().eval()
    x = torch.tensor([[3, 1, 4]])
    exact, plain = net(x), backend.compile(net)
    assert_equal(plain(x), exact)
    floats = sum(p.nbytes for p in net.parameters() if p.dim() == 2)
    torch._dynamo.reset()
    compiled = backend.compile(net, int8_weights=True)
    off = (compiled(x) - exact).abs().max() / exact.abs().max()
    assert 1e-4 < off < 3e-2
    assert weight_bytes() < 0.4 * floats
    net.up.weight.mul_(0.5)
    net.embed.weight.mul_(2.0)
    exact = net(x)
    assert (compiled(x) - exact).abs().max() / exact.abs().max() < 3e-2


def test_training_keeps_its_weights(backend):
    net, twin = Layers(), Layers()
    x = torch.tensor([[3, 1, 4]])
    compiled = backend.compile(net, int8_weights=True)
    assert_equal(compiled(x), twin(x))
    compiled(x).square().mean().backward()
    twin(x).square().mean().backward()
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert_equal(mine.grad, theirs.grad)
