"""Operators that eager keeps, custom ones, hooks, transforms, and arguments that share memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compile.agreement import assert_equal, check
from tests.compile.functions import (
    leaf,
    linear_model,
    mlp,
    qr_in_the_middle,
    randn,
)

pytestmark = pytest.mark.tvm


def sort_in_the_middle(x):
    values, indices = torch.sort((x * 2).relu(), dim=1)
    return values * 2, indices + 1


def unique_in_the_middle(x):
    return torch.unique((x * 2).round()) + 1, x * 2


def nonzero_in_the_middle(x):
    found = (x > 0).nonzero()
    return x[x > 0].sum() * 2, found + 1, x * 2


def several_eager_islands(x):
    a = torch.linalg.qr(x.t() @ x + torch.eye(6))[0]
    b = torch.sort(a @ x.t())[0].relu()
    c = torch.linalg.inv(b @ b.t() + torch.eye(6)) * 2
    return c + a, b.sum()


@pytest.mark.parametrize(
    "fn",
    [
        qr_in_the_middle,
        sort_in_the_middle,
        unique_in_the_middle,
        nonzero_in_the_middle,
        several_eager_islands,
    ],
    ids=lambda f: f.__name__,
)
def test_operators_without_a_rule_run_in_eager(backend, fn):
    backend.check(
        fn,
        lambda: (randn(4, 6),),
        tolerance=1e-3,
        covers=fn not in (unique_in_the_middle, nonzero_in_the_middle),
    )


def test_gradient_through_an_operator_without_a_rule(backend):
    backend.check(qr_in_the_middle, lambda: (leaf(6, 4),), tolerance=1e-3)


def test_custom_operator(backend):
    @torch.library.custom_op("pruner_tests::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(torch.empty_like)
    backend.check(lambda x: torch.ops.pruner_tests.double(x + 1).relu() - 1, lambda: (randn(4, 6),))


def test_custom_operator_that_writes(backend):
    @torch.library.custom_op("pruner_tests::fill", mutates_args=("x",))
    def fill(x: torch.Tensor, value: float) -> None:
        x.fill_(value)

    def fn(x):
        y = x * 2
        torch.ops.pruner_tests.fill(y, 3.0)
        torch.ops.pruner_tests.fill(x, 5.0)
        return y + x, y * 2

    backend.check(fn, lambda: (randn(4, 6),))


def test_custom_autograd_function(backend):
    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(-0.5, 0.5)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (x.abs() < 1)

    backend.check(lambda x: Clip.apply(x * 2) + 1, lambda: (leaf(4, 6),))


@pytest.mark.parametrize("make", [randn, leaf], ids=["inference", "training"])
def test_func_grad_vmap_and_jvp(backend, make):
    def loss(w, x):
        return torch.tanh(x @ w).sum()

    def fn(w, x):
        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
        value, tangent = torch.func.jvp(lambda w: loss(w, x), (w,), (torch.ones_like(w),))
        return per_sample, torch.func.grad(loss)(w, x), value, tangent

    backend.check(fn, lambda: (make(6, 3), make(4, 6)), tolerance=1e-3)


def test_compiled_function_inside_func_transforms(backend):
    compiled = backend.compile(mlp)
    x, w = randn(3, 4), randn(4, 5)
    got = torch.func.grad(lambda w: compiled(x, w).sum())(w)
    assert_equal(got, torch.func.grad(lambda w: mlp(x, w).sum())(w))
    got = torch.func.vmap(compiled, in_dims=(0, None))(randn(2, 3, 4).fill_(0.5), w)
    assert_equal(got, torch.func.vmap(mlp, in_dims=(0, None))(randn(2, 3, 4).fill_(0.5), w))


def test_double_backward_is_refused_or_right(backend):
    def fn(x):
        return (x**3).sum()

    x = leaf(4)
    (gradient,) = torch.autograd.grad(backend.compile(fn)(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(gradient.sum(), x)


def test_forward_hooks_and_backward_hooks(backend):
    def build():
        model = linear_model()
        seen = []
        model[0].register_forward_hook(lambda m, i, o: o * 2)
        model[2].weight.register_hook(lambda g: (seen.append(1), g * 3)[1])
        return model, seen

    (model, seen), (twin, seen_by_eager) = build(), build()
    check(backend.compile(model), twin, lambda: (leaf(2, 8),))
    assert_equal(model[2].weight.grad, twin[2].weight.grad)
    assert len(seen) == len(seen_by_eager) == 2


def test_tied_weights(backend):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 8)
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(torch.tanh(self.embed(tokens)))

    torch.manual_seed(0)
    backend.check_module(Tied(), lambda: (torch.randint(0, 12, (2, 5)),))


def test_the_same_tensor_as_two_arguments(backend):
    def fn(x, y):
        x.add_(1)
        return x + y

    def make():
        x = randn(4, 6)
        return (x, x)

    backend.check(fn, make)


def test_overlapping_views_as_arguments(backend):
    def fn(x, y):
        x.mul_(2)
        return x + y

    def make():
        base = randn(5, 6)
        return (base[:4], base[1:])

    backend.check(fn, make)
