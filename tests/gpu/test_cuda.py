"""Compiled graphs on the GPU at hand: right, on the caller's stream, in torch's memory."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import torch_pruner as tp
from tests.compile.agreement import assert_equal
from tests.contracts.device import DeviceContract
from tests.contracts.vendor import VendorContract
from tests.gpu.test_gpu_compile import Mixed
from torch_pruner.compiler.executors import close_all
from torch_pruner.config import Config
from torch_pruner.devices import device_for
from torch_pruner.devices.cuda import CudaDevice, cuda_executor

if TYPE_CHECKING:
    from torch_pruner.tuner.measure.base import MeasureExecutor

pytestmark = [pytest.mark.tvm, pytest.mark.cuda]
ASKED = {"target": {"kind": "cuda"}}
HALF = 2e-2  # of the largest result
ROUNDED = 2e-3  # of convolutions: torch lets both sides round their operands to tf32


def mixed() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    x, at = torch.randn(2, 3, 8, 8, device="cuda"), torch.tensor([4, 2], device="cuda")
    return Mixed().eval().cuda(), (x, at)


def assert_close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert got.dtype == want.dtype
    assert got.stride() == want.stride()
    assert ((got - want).abs().max() / want.abs().max()).item() < bound


@torch.no_grad()
def test_a_network(cold) -> None:
    net, given = mixed()
    compiled = cold.compile(net, **ASKED)
    for mine, theirs in zip(compiled(*given), net(*given), strict=True):
        assert_close(mine, theirs, ROUNDED)
    report = tp.last_report()
    assert report is not None
    assert report.ops_compiled == report.ops_total
    net.up.weight.mul_(2)
    for mine, theirs in zip(compiled(*given), net(*given), strict=True):
        assert_close(mine, theirs, ROUNDED)


@torch.no_grad()
def test_a_network_that_nobody_asked_to_compile(cold) -> None:
    """Workers run its kernels first, and a later process needs none."""
    net, given = mixed()
    for options in ({}, {"on_miss": "error"}):
        torch._dynamo.reset()
        compiled = cold.compile(net, **options)
        for mine, theirs in zip(compiled(*given), net(*given), strict=True):
            assert_close(mine, theirs, ROUNDED)
        report = tp.last_report()
        assert report is not None
        assert report.ops_compiled == report.ops_total
        assert not report.notes


@torch.no_grad()
def test_a_kernel_that_reads_where_it_must_not_costs_a_worker(cold, monkeypatch) -> None:
    def executor(self: CudaDevice, config: Config, threads: int) -> MeasureExecutor:
        own = (self.fingerprint, self._selector, config.seed)
        return cuda_executor(*own, "tests.gpu.faulty_cuda:LostProducts")

    monkeypatch.setattr(CudaDevice, "executor", executor)
    net, given = mixed()
    for mine, theirs in zip(cold.compile(net)(*given), net(*given), strict=True):
        assert_close(mine, theirs, ROUNDED)
    report = tp.last_report()
    assert report is not None
    assert {"library", "gpu_rows"} <= {t.sketch for t in report.tasks}
    assert all("run_error: " in note for note in report.notes)
    assert report.notes
    close_all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision(cold, dtype) -> None:
    if dtype is torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 128)).to("cuda", dtype)
    x = torch.randn(100, 256, device="cuda", dtype=dtype)
    assert_close(cold.compile(net, **ASKED)(x), net(x), HALF)


def test_training(cold) -> None:
    net = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 5)).cuda()
    twin, x = copy.deepcopy(net), torch.randn(9, 24, device="cuda")
    target = torch.arange(9, device="cuda") % 5
    compiled = cold.compile(net, **ASKED)
    for _ in range(2):
        for model in (compiled, twin):
            torch.manual_seed(1)
            nn.functional.cross_entropy(model(x), target).backward()
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert_equal(mine.grad.cpu(), theirs.grad.cpu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_in_half_precision(cold, dtype) -> None:
    if dtype is torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 72))
    net = net.to("cuda", dtype)
    twin, x = copy.deepcopy(net), torch.randn(80, 64, device="cuda", dtype=dtype)
    compiled = cold.compile(net, **ASKED)
    for _ in range(2):
        for model in (compiled, twin):
            model(x).float().square().mean().backward()
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, HALF)


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self.layers]


@torch.no_grad()
def test_products_of_one_input_are_launched_together(cold) -> None:
    net, x = Siblings().to("cuda", torch.float16), torch.randn(40, 128).to("cuda", torch.float16)
    compiled = cold.compile(net, **ASKED)
    for _ in range(2):
        for mine, theirs in zip(compiled(x), net(x), strict=True):
            assert_close(mine, theirs, HALF)


@torch.no_grad()
def test_a_fresh_thread(cold) -> None:
    """A thread that has done nothing on the device yet calls what another has compiled."""
    net, given = mixed()
    compiled = cold.compile(net, **ASKED)
    want = compiled(*given)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as fresh:
        got = fresh.submit(torch.no_grad()(compiled), *given).result()
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs, 1e-6)


@torch.no_grad()
def test_the_callers_stream(cold) -> None:
    """What a stream has queued before is seen, and nothing waits for the device."""
    net, (x, at) = mixed()
    compiled = cold.compile(net, **ASKED)
    compiled(x, at)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    want = net(x + 1, at)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late = x + 1
        got = compiled(late, at)
        assert not stream.query(), "the call waited for the device"
    stream.synchronize()
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs, ROUNDED)


@torch.no_grad()
def test_memory_is_torchs(cold) -> None:
    net, given = mixed()
    compiled = cold.compile(net, **ASKED)
    compiled(*given)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        out = compiled(*given)
        held = sum(t.untyped_storage().nbytes() for t in out)
        assert torch.cuda.memory_allocated() >= before + held
        del out
    assert torch.cuda.memory_allocated() == before, "the workspace is given back"


@torch.no_grad()
def test_a_graph_of_torch_captures_a_call(cold) -> None:
    net, (x, at) = mixed()
    compiled = cold.compile(net, **ASKED)
    compiled(x, at)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(x, at)
    x.add_(1)
    graph.replay()
    for mine, theirs in zip(out, net(x, at), strict=True):
        assert_close(mine, theirs, ROUNDED)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@torch.no_grad()
def test_every_device_has_its_own(cold) -> None:
    for index in range(2):
        device = torch.device("cuda", index)
        net, x = nn.Linear(16, 32).to(device), torch.randn(5, 16, device=device)
        assert_close(cold.compile(net, **ASKED)(x), net(x), 1e-4)


@torch.no_grad()
def test_tuning_on_the_card(cold) -> None:
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU()).to("cuda", torch.float16)
    x = torch.randn(128, 256, device="cuda", dtype=torch.float16)
    compiled = cold.compile(net, **ASKED, effort="quick", trials=8, time_budget_s=120.0)
    assert_close(compiled(x), net(x), HALF)
    report = tp.last_report()
    assert report is not None
    assert {t.source for t in report.tasks} <= {"tuned", "library"}
    assert all(t.latency_after_s and t.latency_after_s < 1e-3 for t in report.tasks)
    torch._dynamo.reset()
    warm = cold.compile(net, **ASKED, effort="quick", on_miss="error")
    assert_close(warm(x), net(x), HALF)


@torch.no_grad()
def test_cuda_graphs(cold, caplog) -> None:
    """Recorded once; new inputs and new weights are seen by the calls that are replayed."""
    net, (x, at) = mixed()
    compiled = torch.compile(net, backend="pruner", options=cold.options(cuda_graphs=True, **ASKED))
    for k in range(5):
        if k == 3:
            net.up.weight.mul_(2)
        given = x + k
        got = [t.clone() for t in compiled(given, at)]
        for mine, theirs in zip(got, net(given, at), strict=True):
            assert_close(mine, theirs, ROUNDED)
    assert "not recorded" not in caplog.text


def test_cuda_graphs_of_training(cold, caplog) -> None:
    """Forward and backward are recorded once; every step sees what the optimizer wrote."""
    net, (x, at) = mixed()
    reference, _ = mixed()
    compiled = torch.compile(net, backend="pruner", options=cold.options(cuda_graphs=True, **ASKED))
    both = [(compiled, net), (reference, reference)]
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.01) for _, n in both]
    for k in range(6):
        found = []
        for (model, own), optimizer in zip(both, optimizers, strict=True):
            hidden, shares = model(x + k, at)
            (hidden.square().sum() + shares[:, 0].sum()).backward()
            found.append([hidden.detach().clone(), *(p.grad.clone() for p in own.parameters())])
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(*found, strict=True):
            assert_close(mine, theirs, ROUNDED)
    assert "not recorded" not in caplog.text


@torch.no_grad()
def test_renewed_weights_wait_for_kernels_on_other_streams(cold) -> None:
    """What a stream still reads is not handed to others when the weights are packed anew."""
    net = nn.Linear(2048, 2048).cuda().half()
    x = torch.randn(64, 2048, device="cuda").half()
    compiled, stream = cold.compile(net, **ASKED), torch.cuda.Stream()
    compiled(x), net(x)
    for _ in range(5):
        want = net(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            got = compiled(x)
        net.weight.mul_(1.5)
        compiled(x)
        noise = [torch.full((2048, 2048), 9.0, device="cuda").half() for _ in range(8)]
        torch.cuda.current_stream().wait_stream(stream)
        assert_close(got, want, HALF)
        del noise


@torch.no_grad()
def test_a_cache_is_written_where_it_lies(cold) -> None:
    def step(
        cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, q: torch.Tensor
    ) -> torch.Tensor:
        cache.index_copy_(2, at, rows.cos())
        return q @ cache.transpose(-1, -2)

    compiled = cold.compile(step, **ASKED)
    for count in (1, 40):
        cache, q = (torch.randn(1, 4, n, 64, device="cuda").half() for n in (256, 1))
        rows = torch.randn(1, 4, count, 64, device="cuda").half()
        at, twin = torch.arange(7, 7 + count, device="cuda"), cache.clone()
        for _ in range(3):
            assert_close(compiled(cache, rows, at, q), step(twin, rows, at, q), HALF)
            assert_close(cache, twin, HALF)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"int8_weights": True}, {"weight_bits": 4}])
def test_steps_and_prompts_with_weights_of_few_bits(cold, options) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 768), nn.SiLU(), nn.Linear(768, 256)).cuda().half()
    for rows in (1, 5, 40, 300):
        x = torch.randn(rows, 512, device="cuda").half()
        bound = 0.3 if "weight_bits" in options else 3e-2
        assert_close(cold.compile(net, **ASKED, **options)(x), net(x), bound)


@torch.no_grad()
def test_int_weights_and_indices_of_the_device(cold) -> None:
    net = nn.Linear(128, 256).cuda()
    x = torch.randn(1, 128, device="cuda")
    assert_close(cold.compile(net, **ASKED, int8_weights=True)(x), net(x), 2e-2)


class TestDevice(DeviceContract):
    lives_at = torch.device("cuda", 0)
    own_name = "cuda:0"

    @pytest.fixture
    def device(self, config):
        yield device_for(self.lives_at, config)
        close_all()

    @pytest.fixture
    def options(self):
        return ASKED


class TestVendor(VendorContract):
    large = 4096

    @pytest.fixture
    def vendor(self):
        return device_for(torch.device("cuda", 0), Config.from_options(options=ASKED)).vendor()
