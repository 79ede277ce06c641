"""Modules, weights that change after compilation, and modes of torch: as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compile.agreement import assert_equal, assert_same, check, observe
from tests.compile.functions import (
    by_data,
    conv_norm,
    in_place,
    leaf,
    linear_model,
    mlp,
    randn,
)

pytestmark = pytest.mark.tvm


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_statistics(backend, train):
    model = conv_norm().train(train)
    backend.check_module(model, lambda: (randn(2, 3, 6, 6),), calls=3)
    assert int(model.norm.num_batches_tracked) == (3 if train else 0)


def test_batch_norm_statistics_without_gradients(backend):
    model, twin = conv_norm().train(), conv_norm().train()
    compiled = backend.compile(model)
    with torch.no_grad():
        check(compiled, twin, lambda: (randn(2, 3, 6, 6),), calls=3)
    assert_equal(model.norm.running_mean, twin.norm.running_mean)
    assert_equal(model.norm.running_var, twin.norm.running_var)


class Turned(nn.Module):
    """Normalises the last dimension: eager's result lies as the input did, the traced one densely.

    A view of the traced one is an error in eager.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.leave = nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.norm(x.transpose(1, 2)).transpose(1, 2).reshape(-1, 16))


@torch.no_grad()
def test_a_view_of_what_eager_lays_out_otherwise(backend):
    backend.check_module(Turned().eval(), lambda: (randn(4, 9, 16),), calls=3)


def test_switching_between_train_and_eval(backend):
    model, twin = conv_norm(), conv_norm()
    compiled = backend.compile(model)
    for train in (True, False, True):
        compiled.train(train)
        twin.train(train)
        check(compiled, twin, lambda: (randn(2, 3, 6, 6),), calls=1)


@pytest.mark.parametrize("train", [True, False])
def test_channels_last(backend, train):
    def make():
        return (randn(2, 3, 6, 6).to(memory_format=torch.channels_last).requires_grad_(train),)

    model = conv_norm().train(train).to(memory_format=torch.channels_last)
    if train:
        backend.check_module(model, make)
    else:
        with torch.no_grad():
            backend.check_module(model, make)


def test_channels_last_input_of_a_contiguous_model(backend):
    with torch.no_grad():
        backend.check_module(
            conv_norm().eval(), lambda: (randn(2, 3, 6, 6).to(memory_format=torch.channels_last),)
        )


def test_buffer_written_by_the_model(backend):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("history", torch.zeros(4, 3))

        def forward(self, x):
            self.count += 1
            self.history[1:] = self.history[:-1].clone()
            self.history[0] = x
            return self.history.sum(0) * self.count

    backend.check_module(Counter(), lambda: (randn(3),), calls=4)


def in_inference_mode(model):
    with torch.inference_mode():
        for p in model.parameters():
            p.mul_(1.5)


def load(model):
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


def load_assigned(model):
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)


def by_optimizer(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def by_foreach_adam(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3, foreach=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def by_data_twice(model):
    """The second new tensor may lie where the one before the first lay."""
    for _ in range(2):
        for p in model.parameters():
            p.data = p.data + 1


def by_data_in_place(model):
    """``.data`` hides the write from the version counter, so the caller has to tell."""
    for p in model.parameters():
        p.data.add_(1)
        torch.autograd.graph.increment_version(p)


def by_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 2, model.parameters())


def by_new_parameter(model):
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)


def by_initialisation(model):
    nn.init.normal_(model[0].weight)


def by_half_of_it(model):
    with torch.no_grad():
        model[0].weight[3:5].fill_(2.0)


CHANGES = [
    in_place, in_inference_mode, load, load_assigned, by_optimizer, by_foreach_adam, by_data,
    by_data_twice, by_data_in_place, by_vector, by_new_parameter, by_initialisation, by_half_of_it,
]  # fmt: skip


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda m: m.__name__
)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changed_weights_are_seen(backend, change, mode):
    model = linear_model()
    compiled = backend.compile(model)
    x = torch.ones(2, 8)
    with mode():
        before = compiled(x).clone()
        compiled(x)
    for _ in range(3):
        torch.manual_seed(0)
        change(model)
        with mode():
            got, expected = compiled(x), model(x)
        assert_equal(got.detach(), expected.detach())
        with mode():
            assert_equal(compiled(x).detach(), expected.detach())
    assert not torch.equal(before.detach(), got.detach())


def test_no_grad_and_grad_take_turns(backend):
    compiled = backend.compile(mlp)
    make = lambda: (leaf(3, 4), leaf(4, 5))  # noqa: E731
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad):
        with context():
            a, b = observe(compiled, make), observe(mlp, make)
        assert_same(a, b)
        assert a.outputs[0].is_inference() == b.outputs[0].is_inference()


def test_no_grad_inside(backend):
    def fn(x, w):
        with torch.no_grad():
            scale = x.abs().mean()
        return (x @ w) / scale, scale

    backend.check(fn, lambda: (leaf(3, 4), leaf(4, 5)))


def test_detach_inside(backend):
    def fn(x, w):
        h = x @ w
        return (h - h.detach().mean()) * h, h.detach()

    backend.check(fn, lambda: (leaf(3, 4), leaf(4, 5)))


def test_model_made_in_inference_mode(backend):
    with torch.inference_mode():
        model = linear_model()
        compiled = backend.compile(model)
        for _ in range(3):
            x = randn(2, 8)
            assert_equal(compiled(x), model(x))
            model[0].weight.mul_(2)


def test_inference_tensor_into_a_model_outside_of_the_mode(backend):
    model = linear_model()
    with torch.inference_mode():
        x = randn(2, 8)
    compiled = backend.compile(model)
    with torch.no_grad():
        assert_equal(compiled(x), model(x))


@pytest.mark.parametrize("make", [randn, leaf], ids=["inference", "training"])
def test_ambient_autocast(backend, make):
    compiled = backend.compile(mlp)
    args = lambda: (make(8, 16), make(16, 8))  # noqa: E731
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = observe(compiled, args), observe(mlp, args)
    assert b.outputs[0].dtype is torch.bfloat16
    assert_same(a, b, 5e-2)
    assert_same(observe(compiled, args), observe(mlp, args))


@pytest.mark.parametrize("make", [randn, leaf], ids=["inference", "training"])
def test_autocast_inside(backend, make):
    def fn(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = x @ w
            with torch.autocast("cpu", enabled=False):
                full = h.float() @ w.t()
        return h, full + 1

    backend.check(fn, lambda: (make(8, 16), make(16, 8)), tolerance=0.1)
