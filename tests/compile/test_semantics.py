"""A compiled function does what eager does.

Values, gradients, mutation, aliasing, strides, random numbers and modes are eager's.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compile.agreement import assert_equal, check
from tests.compile.functions import (
    leaf,
    randn,
)

pytestmark = pytest.mark.tvm


def returns_structures(x, y):
    return {"sum": x + y, "rest": (None, 3, 2.5, [x * 2]), "text": "name", "flag": True}


def transposed_output(x, y):
    return (x * y).t(), (x + y).transpose(0, 1)[1:], (x - y).T.unsqueeze(0)


def views_of_inputs(x, y):
    return x.t(), y[1:, ::2], x.view(-1), x * y


def views_of_intermediates(x, y):
    z = x + y
    return z[0], z.view(2, 12), z, z.t()


def same_tensor_twice(x, y):
    z = x * y
    return z, z, x + 1


def an_input_as_output(x, y):
    return x, x + y, y


def input_view_and_result(x, y):
    return x[1:], (x * 2)[1:], x.detach()


def mutates_input(x, y):
    x.add_(y)
    return x * 2


def multiplies_input(x, y):
    x.mul_(2)
    return


def assigns_by_index(x, y):
    x[1:3, ::2] = y[:2, ::2]
    x[0] = 1.5
    return x + y


def mutates_a_view(x, y):
    x.t()[2].mul_(y[:, 0])
    return x.sum(1)


def mutates_intermediate(x, y):
    z = x * 2
    view = z[1]
    view.add_(y[0])
    z.relu_()
    return z, view


def mutates_and_returns_alias(x, y):
    x.add_(1)
    return x.view(-1), y + x


def mutates_twice(x, y):
    x.add_(y)
    y.add_(x)
    x.copy_(y * 2)


def resets_input(x, y):
    x.zero_()
    return y + x


def broadcasts(x, y):
    return x.view(4, 6, 1, 1) * y.view(1, 1, 4, 6) + x[0].view(1, 6, 1, 1)


def scalars(x, y):
    total = x.sum()
    return total, total * 2, total + y, y.mean() / total


def item_free_reductions(x, y):
    return (
        x.amax(0),
        y.argmax(1),
        x.std(1),
        y.var(),
        x.prod(1),
        (x > y).any(0),
        (x > y).all(),
        x.cumsum(1),
    )


def softmaxes(x, y):
    return x.softmax(-1), y.log_softmax(0), torch.logsumexp(x, 1)


def meets_itself_transposed(x, y):
    """An epilogue that wants two elements of the product at once; it was fused all the same."""
    product = x @ y.t()
    return product + product.t(), (product * 2).relu() - product.t()


def one_kernel_feeds_another(x, y):
    """LLVM swapped the write of the first and the read of the second once both were inlined."""
    return torch.softmax(x[:3] @ y.t(), -1), x.sum(0), torch.softmax(x @ y.t(), 0) @ y


FUNCTIONS = [
    returns_structures, transposed_output, views_of_inputs, views_of_intermediates,
    same_tensor_twice, an_input_as_output, input_view_and_result, mutates_input, multiplies_input,
    assigns_by_index, mutates_a_view, mutates_intermediate, mutates_and_returns_alias,
    mutates_twice, resets_input, broadcasts, scalars, item_free_reductions, softmaxes,
    meets_itself_transposed, one_kernel_feeds_another,
]  # fmt: skip


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_outputs_aliases_and_mutation_are_eagers(backend, fn):
    backend.check(fn, lambda: (randn(4, 6), randn(4, 6)))


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_outputs_aliases_and_mutation_on_transposed_inputs(backend, fn):
    def make():
        return (randn(6, 4).t(), randn(6, 4).t())

    if "view(" in fn.__name__ or fn in (
        views_of_inputs,
        broadcasts,
        mutates_and_returns_alias,
        views_of_intermediates,
    ):
        pytest.skip("eager cannot view these")
    backend.check(fn, make)


NOT_DIFFERENTIABLE = (
    mutates_input, multiplies_input, assigns_by_index, mutates_a_view, mutates_and_returns_alias,
    mutates_twice, resets_input, an_input_as_output,
)  # fmt: skip


@pytest.mark.parametrize(
    "fn", [f for f in FUNCTIONS if f not in NOT_DIFFERENTIABLE], ids=lambda f: f.__name__
)
def test_gradients_are_eagers(backend, fn):
    backend.check(fn, lambda: (leaf(4, 6), leaf(4, 6)))


@pytest.mark.parametrize(
    "fn", [f for f in FUNCTIONS if f not in NOT_DIFFERENTIABLE], ids=lambda f: f.__name__
)
def test_gradient_of_one_input_only(backend, fn):
    backend.check(fn, lambda: (randn(4, 6), leaf(4, 6)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fn", [f for f in FUNCTIONS if f is not mutates_twice], ids=lambda f: f.__name__
)
def test_other_floating_dtypes(backend, fn, dtype):
    backend.check(fn, lambda: (randn(4, 6, dtype=dtype), randn(4, 6, dtype=dtype)))


def test_mutation_of_a_differentiable_intermediate(backend):
    def fn(x, w):
        z = x @ w
        z.add_(1)
        z[0].mul_(2)
        return z.relu_()

    backend.check(fn, lambda: (leaf(3, 4), leaf(4, 5)))


def test_double_use_and_retain_graph(backend):
    def fn(x, w):
        h = torch.tanh(x @ w)
        return (h * h + h).sum()

    def twice(fn):
        def run(x, w):
            loss = fn(x, w)
            loss.backward(retain_graph=True)
            loss.backward()
            return x.grad.clone(), w.grad.clone()

        return run

    check(twice(backend.compile(fn)), twice(fn), lambda: (leaf(3, 4), leaf(4, 5)))


def test_gradient_by_autograd_grad_with_given_seed(backend):
    def fn(x, w):
        return torch.sigmoid(x @ w), (x * 2)

    def vjp(fn):
        def run(x, w):
            a, b = fn(x, w)
            return torch.autograd.grad((a, b), (x, w), (torch.ones_like(a) * 0.5, b.detach()))

        return run

    check(vjp(backend.compile(fn)), vjp(fn), lambda: (leaf(3, 4), leaf(4, 5)))


def test_backward_of_one_output_of_two(backend):
    def fn(x, w):
        return x @ w, x.sum(0)

    def run_of(fn):
        def run(x, w):
            fn(x, w)[1].sum().backward()
            # AOTAutograd hands back zeros where eager leaves None, whatever the backend.
            return x.grad.clone(), torch.zeros_like(w) if w.grad is None else w.grad.clone()

        return run

    x, w = leaf(3, 4), leaf(4, 5)
    for got, expected in zip(
        run_of(backend.compile(fn))(x, w),
        run_of(fn)(x.detach().requires_grad_(), w.detach().requires_grad_()),
        strict=True,
    ):
        assert_equal(got, expected)


def test_frozen_parameters_get_no_gradient(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    backend.check_module(model, lambda: (randn(5, 6),))
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


def dropout_training(x):
    return F.dropout(x, 0.4, training=True) * 2, F.dropout(x + 1, 0.2)


def dropout_eval(x):
    return F.dropout(x, 0.4, training=False) * 2


def rand_like(x):
    return torch.rand_like(x) + x, torch.randn(3, 4) * 2, torch.bernoulli(torch.sigmoid(x)) * x


def random_then_dropout(x):
    noise = torch.randn_like(x) * x.sum()
    return (
        F.dropout(x + noise, 0.5, training=True),
        torch.randint(0, 5, (4,)) + 1,
        torch.randperm(5),
    )


def in_place_random(x):
    return torch.empty_like(x).uniform_(-1, 1) * x, torch.empty_like(x).normal_() + x


@pytest.mark.parametrize("make", [randn, leaf], ids=["inference", "training"])
@pytest.mark.parametrize(
    "fn",
    [dropout_training, dropout_eval, rand_like, random_then_dropout, in_place_random],
    ids=lambda f: f.__name__,
)
def test_random_numbers_are_eagers(backend, fn, make):
    backend.check(fn, lambda: (make(4, 6),), calls=3)


def test_dropout_differs_from_call_to_call(backend):
    compiled = backend.compile(dropout_training)
    x = torch.ones(64)
    torch.manual_seed(0)
    masks = [compiled(x)[0] for _ in range(3)]
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
