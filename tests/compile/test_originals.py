"""Memory of parameters whose copies alone are read: freed on request, and there when accessed."""

from __future__ import annotations

import copy
import gc
import io
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_pruner as tp
from tests.compile.agreement import assert_equal

pytestmark = [
    pytest.mark.tvm,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is asked of Linux"),
]

WIDE = 2048


def anonymous_bytes() -> int:
    """Of this process that no file has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith("RssAnon:"))


@pytest.fixture
def net() -> nn.Sequential:
    gc.collect()  # programs of the test before hold weights of the same shapes
    torch.manual_seed(0)
    layers = [nn.Linear(64, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 8)]
    return nn.Sequential(*layers).eval().to(torch.bfloat16).float()


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.clone().view(torch.int32) for name, t in model.state_dict().items()}


@torch.no_grad()
def test_parameters_are_freed_and_there(backend, net, tmp_path):
    x = torch.randn(1, 64)
    net[2].weight.view(torch.int32)[:8, 0] = torch.tensor(
        [0, -(1 << 31), 1 << 16, 0x7FC00000, 0x7F810000, 0x7F800000, 0x00010000, -65536],
        dtype=torch.int64,
    ).to(torch.int32)
    before, expected, alias = bits(net), net(x), net[2].weight.detach()
    compiled = backend.compile(net, weights="frozen", check="off")
    first = compiled(x)
    held = anonymous_bytes()
    freed = tp.free_originals(net, tmp_path)
    assert freed >= net[2].weight.nbytes + net[0].weight.nbytes
    assert held - anonymous_bytes() > 0.9 * net[2].weight.nbytes
    assert not list(tmp_path.glob("originals*"))
    assert tp.free_originals(net, tmp_path) == 0
    for reader in (net, copy.deepcopy(net), _saved(net)):
        assert all(torch.equal(v, before[k]) for k, v in bits(reader).items())
    assert torch.equal(alias.view(torch.int32), before["2.weight"])
    assert torch.allclose(net(x), expected, equal_nan=True)
    assert torch.allclose(compiled(x), first, equal_nan=True)
    net.load_state_dict({k: v.view(torch.float32) for k, v in before.items()})
    net[2].weight[0, 0] = 3
    assert alias[0, 0] == 3


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@torch.no_grad()
def test_other_sizes_come_later(backend, net, tmp_path):
    compiled = backend.compile(net, weights="frozen", dynamic=False)
    for rows in (1, 40):
        x = torch.randn(rows, 64)
        assert_equal(compiled(x), net(x))
        tp.free_originals(net, tmp_path)
    x = torch.randn(3, 64)
    assert_equal(compiled(x), net(x))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"weights": "frozen", "narrow_weights": False}])
def test_what_is_read_stays(backend, net, options, tmp_path):
    """Checked parameters are looked at, and few rows read float32 weights where they lie."""
    x = torch.randn(1, 64)
    compiled = backend.compile(net, **options)
    compiled(x)
    freed = tp.free_originals(net, tmp_path)
    assert freed < net[2].weight.nbytes  # a small one may be packed
    assert freed == 0 or options
    assert_equal(compiled(x), net(x))


@torch.no_grad()
def test_a_step_reads_what_the_prompt_packed(backend, net, tmp_path):
    """So nobody reads the weights where they lie, and one copy serves both."""
    compiled = backend.compile(net, weights="frozen", narrow_weights=False, dynamic=False)
    packed = []
    for rows in (40, 1):
        x = torch.randn(rows, 64)
        assert_equal(compiled(x), net(x))
        packed.append(tp.last_report().weight_bytes)
    assert packed[0] == packed[1] >= net[2].weight.nbytes
    held = anonymous_bytes()
    assert tp.free_originals(net, tmp_path) >= net[2].weight.nbytes
    assert held - anonymous_bytes() > 0.9 * net[2].weight.nbytes
    for rows in (1, 40):
        x = torch.randn(rows, 64)
        assert_equal(compiled(x), net(x))


@torch.no_grad()
def test_what_was_built_alone_serves_beside_others(backend, net):
    """Where nothing may be built, a step runs as it was built without a prompt."""
    options = {"weights": "frozen", "narrow_weights": False}
    for misses, sizes in (("tune", (1,)), ("tune", (40,)), ("error", (40, 1))):
        torch._dynamo.reset()
        gc.collect()
        compiled = backend.compile(net, dynamic=False, on_miss=misses, **options)
        for rows in sizes:
            x = torch.randn(rows, 64)
            assert_equal(compiled(x), net(x))


@torch.no_grad()
def test_what_nobody_compiled_stays(net, tmp_path):
    assert tp.free_originals(net, tmp_path) == 0


@torch.no_grad()
def test_a_folder_that_cannot_be_written(backend, net, tmp_path):
    x = torch.randn(1, 64)
    compiled = backend.compile(net, weights="frozen")
    compiled(x)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        tp.free_originals(net, tmp_path / "file")
    assert_equal(compiled(x), net(x))
