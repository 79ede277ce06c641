"""float32 modules whose weights came from bfloat16: half of the bytes, and never a wrong result."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import torch_pruner as tp
from tests.compile.agreement import assert_equal
from torch_pruner import exc
from torch_pruner.dynamo.run import packed_inputs
from torch_pruner.target import TargetSpec

pytestmark = pytest.mark.tvm

X = torch.tensor([[3, 1, 4]])


class Layers(nn.Module):
    """Tied embeddings, as GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        return nn.functional.linear(h + self.down(self.up(h).relu()), self.embed.weight)


@pytest.fixture
def net() -> Layers:
    return Layers().eval().to(torch.bfloat16).float()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many narrow copies were made, by dtype."""
    made: Counter[str] = Counter()
    plain = packed_inputs.narrow_copy

    def counted(tensor: torch.Tensor, dtype: str, order: tuple[int, ...]) -> torch.Tensor:
        found = plain(tensor, dtype, order)
        made[dtype] += 1
        return found

    monkeypatch.setattr(packed_inputs, "narrow_copy", counted)
    return made


@torch.no_grad()
def test_weights_that_change(backend, net, copies):
    compiled = backend.compile(net)
    assert_equal(compiled(X), net(X))
    assert copies == {"bfloat16": 3}
    net.up.weight.mul_(2)  # still narrow
    assert_equal(compiled(X), net(X))
    seen = copies["bfloat16"]
    assert seen > 3
    net.down.weight.data[5:9] += 1e-3  # of which torch says nothing, and which is not narrow
    assert_equal(compiled(X), net(X))
    net.embed.weight.mul_(0.7)
    assert_equal(compiled(X), net(X))
    assert copies["bfloat16"] <= seen + 3
    net.up.weight = nn.Parameter(torch.randn(256, 64))
    assert_equal(compiled(X), net(X))


@torch.no_grad()
def test_weights_of_few_exponents(backend, caplog):
    """Twelve bits, then sixteen, then all of them; the result is eager's, whatever is kept."""
    torch.manual_seed(0)
    net = nn.Linear(512, 256).eval().to(torch.bfloat16).float()
    x = torch.randn(1, 512)
    compiled = backend.compile(net)
    assert_equal(compiled(x), net(x))
    report = tp.last_report()
    assert report is not None
    sketches = {t.sketch for g in report.graphs for t in g.tasks}
    if TargetSpec.detect().is_x86 and TargetSpec.detect().vector_bytes > 16:
        assert sketches == {"coded_rows"}
    assert report.weight_bytes < 0.45 * net.weight.nbytes
    net.weight.mul_(4)
    assert_equal(compiled(x), net(x))
    wider = "built for wider weights"
    with caplog.at_level("INFO", "torch_pruner"):
        net.weight.data *= 2.0 ** torch.randint(-40, 0, net.weight.shape)  # bfloat16 still
        assert_equal(compiled(x), net(x))
        assert caplog.text.count(wider) == ("coded_rows" in sketches)
        net.weight.mul_(0.7)
        assert_equal(compiled(x), net(x))
        assert caplog.text.count(wider) == 1 + ("coded_rows" in sketches)


@torch.no_grad()
def test_half_of_the_bytes(backend, net):
    x = torch.arange(40)[None]  # many rows, whose weights are packed

    def held(**options: object) -> int:
        torch._dynamo.reset()
        assert_equal(backend.compile(net, **options)(x), net(x))
        report = tp.last_report()
        assert report is not None
        return report.weight_bytes

    wide = held(narrow_weights=False)
    assert held() < 0.75 * wide  # of which the embedding's rows are read from another copy
    net.half().float()
    assert held() < 0.75 * wide
    for parameter in net.parameters():
        parameter.data[0] = 1 / 3
    assert held(weights="frozen") == wide


@torch.no_grad()
def test_graphs_share_copies(backend, net, copies):
    for x in (X, torch.zeros(40, 1, dtype=torch.int64)):
        torch._dynamo.mark_static(x)
        assert_equal(backend.compile(net, dynamic=False)(x), net(x))
    assert copies["bfloat16"] <= 6  # 3 if both graphs read one of them as it lies


@torch.no_grad()
def test_float32_kernels_that_cannot_be_built(backend, net, monkeypatch, caplog):
    """The graph is computed by its definition then, which is slow and right."""
    compiled = backend.compile(net, strict=False)
    compiled(X)

    def fails(*_: object) -> None:
        raise exc.CompileError("kernel", "no compiler here")

    net.up.weight.add_(1e-3)
    monkeypatch.setattr("torch_pruner.compiler.driver.Compiler.compile", fails)
    with caplog.at_level("WARNING", "torch_pruner"):
        for _ in range(2):
            assert_equal(compiled(X), net(X))
    assert sum("interpreted" in r.message for r in caplog.records) == 1


@torch.no_grad()
def test_weights_of_other_numbers_are_as_they_were(backend, copies):
    net = Layers().eval()
    assert_equal(backend.compile(net)(X), net(X))
    assert not copies


@torch.no_grad()
def test_sizes_that_change(backend, net, copies):
    compiled = backend.compile(net, dynamic=True)
    for n in (3, 5, 3):
        x = torch.arange(n)[None]
        assert_equal(compiled(x), net(x))
    assert copies


@torch.no_grad()
def test_what_is_compiled_is_what_is_explained_and_ready(backend, net, tmp_path):
    """Both look at what the parameters hold."""
    options = backend.options(cache_dir=str(tmp_path / "own"))
    with pytest.raises(exc.CacheMiss):
        tp.check_ready(net, (X,), options)
    compiled = torch.compile(net, backend="pruner", dynamic=False, options=options)
    compiled(X)
    tp.check_ready(net, (X,), options)
    known = {t.workload for g in tp.explain(net, (X,), options).graphs for t in g.tasks}
    report = tp.last_report()
    assert report is not None
    assert known == {t.workload for g in report.graphs for t in g.tasks}


class Across(nn.Module):
    """A product whose weight's columns are neighbours, as transformers' Conv1D has it."""

    def __init__(self, depth: int, columns: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(depth, columns))
        self.bias = nn.Parameter(torch.randn(columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


def filled(weight: torch.Tensor, dtype: torch.dtype) -> None:
    """Normal numbers of a dtype, with denormals in a column and infinities and NaN in others."""
    words = weight.to(dtype).view(torch.int16)
    words[:, 3] = torch.randint(-(1 << 15), 1 << 15, words[:, 3].shape).to(torch.int16) & ~0x7F80
    last = -32768 if dtype is torch.bfloat16 else 1
    words[:4, 7] = torch.tensor([last, 1, 0x0040, -32767], dtype=torch.int16)
    if dtype is torch.bfloat16:  # a NaN does not come back from float16
        words[5, 9], words[6, 9], words[7, 11] = 0x7F80, -128, 0x7FC1
    weight.copy_(words.view(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("depth", [496, 512])
@torch.no_grad()
def test_columns_that_are_neighbours(backend, dtype, depth, copies):
    """Bit for bit what a linear layer of the same numbers gives; kept once, and in no panels."""
    net = Across(depth, 256).eval()
    filled(net.weight, dtype)
    line = nn.Linear(depth, 256).eval()
    line.weight.copy_(net.weight.T)
    line.bias.copy_(net.bias)
    x = torch.randn(1, depth)
    compiled, straight = backend.compile(net), backend.compile(line)
    for _ in range(2):
        assert torch.equal(compiled(x).view(torch.int32), straight(x).view(torch.int32))
        report = tp.last_report()
        assert report is not None
        assert {t.sketch for g in report.graphs for t in g.tasks} <= {"coded_rows", "in_place"}
        assert_equal(compiled(x), net(x))
        net.weight.data[8:, 20:] *= 2  # of which torch says nothing
        line.weight.copy_(net.weight.T)
    net.weight[17, 19] = 1 / 3  # no longer narrow
    assert_equal(compiled(x), net(x))
    assert set(copies) == {str(dtype).removeprefix("torch.")}


@torch.no_grad()
def test_a_prompt_and_a_step_of_columns_that_are_neighbours(backend):
    """The prompt packs what the step reads turned; both see a weight that changes."""
    net = nn.Sequential(Across(128, 512), nn.ReLU(), Across(512, 128)).eval()
    net.to(torch.bfloat16).float()
    compiled = backend.compile(net, dynamic=False)
    for change in (1.0, 0.5, 0.7):
        for p in net.parameters():
            p.data *= change
        for rows in (40, 1, 3):
            x = torch.randn(rows, 128)
            assert_equal(compiled(x), net(x))
