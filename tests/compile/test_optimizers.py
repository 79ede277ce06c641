"""Steps of optimizers that are compiled: as in eager, written where parameters lie."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torch_pruner as tp

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 7))


def stepped(net: nn.Module, name: str, compiled: Callable[..., Any], steps: int = 6) -> Any:
    make, options = OPTIMIZERS[name]
    optimizer = make(net.parameters(), **options)
    step = compiled(optimizer.step)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        step()
    return optimizer


def pruner(tmp_path) -> Callable[..., Any]:
    options = {"effort": "none", "cache_dir": str(tmp_path)}
    return lambda step: torch.compile(lambda: step(), backend="pruner", options=options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_as_in_eager(name: str, tmp_path) -> None:
    net = model()
    other = copy.deepcopy(net)
    places = [p.data_ptr() for p in other.parameters()]
    stepped(net, name, lambda step: step)
    optimizer = stepped(other, name, pruner(tmp_path))
    for a, b in zip(other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert [p.data_ptr() for p in other.parameters()] == places
    assert optimizer.state
    (graph,) = tp.last_report().graphs[-1:]
    assert graph.ops_compiled == graph.ops_total


def test_nothing_is_made_anew(tmp_path) -> None:
    """After the first call, which is compared, a step allocates less than one parameter."""
    net = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step = pruner(tmp_path)(optimizer.step)
    net.weight.grad, net.bias.grad = torch.randn(512, 512), torch.randn(512)
    for _ in range(3):
        step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    made = sum(e.self_cpu_memory_usage for e in profile.events() if e.self_cpu_memory_usage > 0)
    assert made < net.weight.nbytes


def renewed(p: torch.Tensor, other: torch.Tensor) -> None:
    p.copy_(torch.tanh(p) + other * 0.5)


@pytest.mark.parametrize(
    "tensors",
    [
        lambda x: (x[256:768], x[:512]),  # one reaches into the other
        lambda x: (x[1:513], x[600:1112]),  # not aligned
        lambda x: (x[:512], x[:512]),
    ],
)
def test_tensors_that_share_memory(tensors, tmp_path) -> None:
    """Compiled for two that do not."""
    call = torch.compile(
        renewed, backend="pruner", options={"effort": "none", "cache_dir": str(tmp_path)}
    )
    memory = torch.randn(2048)
    for _ in range(3):
        call(torch.randn(512), torch.randn(512))
    for _ in range(2):
        p, other = tensors(memory.clone())
        wanted = torch.tanh(p) + other * 0.5
        call(p, other)
        torch.testing.assert_close(p, wanted)


def exchanged(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    old = a.clone()
    a.copy_(b * 2)
    b.copy_(old + 1)
    return old.sum()


def test_each_becomes_what_the_other_was(tmp_path) -> None:
    call = torch.compile(
        exchanged, backend="pruner", options={"effort": "none", "cache_dir": str(tmp_path)}
    )
    for _ in range(4):
        a, b = torch.randn(300), torch.randn(300)
        old = a.clone(), b.clone()
        total = call(a, b)
        torch.testing.assert_close(total, old[0].sum())
        torch.testing.assert_close(a, old[1] * 2)
        torch.testing.assert_close(b, old[0] + 1)
