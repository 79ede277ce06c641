"""Values that a forward keeps for its backward lie as kernels want them, and nothing else does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torch_pruner.dynamo.lower import activations
from torch_pruner.dynamo.run.runtime import RegionCall

pytestmark = pytest.mark.tvm


class Net(nn.Module):
    """A convolution whose result leaves the model, too, and one whose result does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 24, 3, padding=1, bias=False)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        seen = self.first(x)
        hidden = torch.relu(self.norm(seen))
        y = nn.functional.max_pool2d(torch.tanh(self.second(hidden)), 3, stride=2)
        return seen, self.head(y.mean((2, 3)))


@pytest.fixture
def kept(monkeypatch):
    """The values of four dimensions that backward graphs are compiled for."""
    found = []
    original = activations.adopt

    def adopt(gm, example_inputs):
        found.extend(v for v in example_inputs if isinstance(v, torch.Tensor) and v.dim() == 4)
        original(gm, example_inputs)

    monkeypatch.setattr(activations, "adopt", adopt)
    return found


def step(call, x):
    seen, y = call(x)
    (seen.square().mean() + y.square().sum()).backward()
    return seen, y


def channels_last(value: torch.Tensor) -> bool:
    return value.is_contiguous(memory_format=torch.channels_last)


def test_they_lie_channels_last_and_gradients_agree(cold, kept) -> None:
    model, x = Net(), torch.randn(2, 3, 12, 12)
    reference = copy.deepcopy(model)
    compiled = cold.compile(model, effort="none", strict=True)
    for _ in range(2):
        model.zero_grad(), reference.zero_grad()
        outputs, expected = step(compiled, x), step(reference, x)
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
        assert outputs[0].stride() == expected[0].stride()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
            assert mine.grad.stride() == theirs.grad.stride()
    made = [v for v in kept if v.shape[1] in (16, 24) and v.shape[2] > 3]
    apart = [v for v in made if not channels_last(v)]
    assert len(made) >= 4
    # What the caller gets keeps eager's strides, and so do gradients that come from outside.
    assert all(v.shape == (2, 16, 12, 12) for v in apart)
    assert any(channels_last(v) and v.shape[1] == 24 for v in made)


def test_a_forward_that_eager_runs_suits_the_backward_as_well(cold, kept, monkeypatch) -> None:
    """Its strides are eager's and not those that were announced: the backward copies."""
    model, x = Net(), torch.randn(2, 3, 12, 12)
    reference = copy.deepcopy(model)
    compiled = cold.compile(model, effort="none")
    step(compiled, x)
    assert any(channels_last(v) for v in kept)
    original = RegionCall.__call__
    as_eager = lambda self, inputs: [v.contiguous() for v in original(self, inputs)]  # noqa: E731
    monkeypatch.setattr(RegionCall, "__call__", as_eager)
    model.zero_grad()
    step(compiled, x), step(reference, x)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_sequences_of_other_networks_stay(cold, kept) -> None:
    """Attention has values of four dimensions, too, and no channels."""
    attend = nn.functional.scaled_dot_product_attention

    def fn(q, k, v):
        return attend(torch.tanh(q), k * 2, v)

    given = [torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3)]
    cold.compile(fn, effort="none")(*given).sum().backward()
    assert kept
    assert all(v.is_contiguous() or not channels_last(v) for v in kept)


class Scaled(nn.Module):
    """Reads a buffer, and renews it afterwards: what it has read is what the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 20))
        self.register_buffer("seen", torch.linspace(-2.0, 2.0, 20))

    def forward(self, x):
        scale = nn.functional.leaky_relu(self.seen, 0.1)
        scale = scale * torch.rsqrt(scale.pow(2).mean() + 1e-5)
        self.seen.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return scale * self.weight * x


def test_an_input_that_is_written_afterwards_is_kept_as_it_was(cold) -> None:
    model = Scaled()
    reference = copy.deepcopy(model)
    compiled = cold.compile(model, effort="none", strict=True)
    for seed in range(3):
        x = torch.randn(6, 20, generator=torch.Generator().manual_seed(seed))
        for call in (compiled, reference):
            call(x).square().sum().backward()
        torch.testing.assert_close(model.weight.grad, reference.weight.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.seen, reference.seen)


class Between(nn.Module):
    """Attention of what a convolution has made: torch wants its neighbours to lie together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Conv2d(3, 8, 3, padding=1)
        self.after = nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x):
        given = self.before(x)
        found = nn.functional.scaled_dot_product_attention(given, given * 2, given)
        return self.after(torch.tanh(given)), found


@pytest.mark.parametrize("compiles", [True, False])
def test_eager_operators_get_what_was_kept_as_eager_keeps_it(cold, kept, monkeypatch, compiles):
    """``compiles``: or whatever a backward graph does is left to eager."""
    if not compiles:
        original = activations.adopt

        def adopt(gm, example_inputs):
            original(gm, example_inputs)
            monkeypatch.setattr(RegionCall, "__call__", refuse)

        def refuse(self, inputs):
            raise RuntimeError("no kernels")

        monkeypatch.setattr(activations, "adopt", adopt)
    model, x = Between(), torch.randn(2, 3, 12, 12)
    reference = copy.deepcopy(model)
    compiled = cold.compile(model, effort="none", strict=compiles)
    for call in (compiled, reference):
        y, found = call(x)
        (y.square().sum() + found.square().sum()).backward()
    assert any(channels_last(v) and not v.is_contiguous() for v in kept)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_what_eager_reads_in_the_forward_lies_as_eager_has_it(cold, kept) -> None:
    """A view that is none of channels last follows an operator that eager runs."""
    weight = torch.nn.Parameter(torch.randn(7, 7, 3, 3, generator=torch.Generator().manual_seed(0)))

    def fn(x):
        normal = nn.functional.group_norm(nn.functional.conv2d(x, weight), 1)
        return normal.sort(1)[0].view(-1), torch.tanh(normal)

    x, compiled = torch.randn(2, 7, 6, 6), cold.compile(fn, effort="none", strict=True)
    found = []
    for call in (compiled, fn):
        weight.grad = None
        flat, y = call(x)
        (flat.square().sum() + y.sum()).backward()
        found.append((flat, weight.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


def test_gradients_of_the_largest_find_it_again(cold) -> None:
    """The backward compares what the forward has computed with the largest of it."""
    layer = nn.Linear(3, 4, dtype=torch.float64)

    def fn(x):
        return torch.erf(layer(x)).transpose(0, 1).amax(1) * 2

    compiled = cold.compile(fn, effort="none", strict=True)
    for seed in range(3):
        x = torch.randn(33, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        gradients = [
            torch.autograd.grad(f(x).sum(), list(layer.parameters())) for f in (compiled, fn)
        ]
        torch.testing.assert_close(*gradients)
