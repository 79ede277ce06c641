"""A compiled function does what eager does.

Values, gradients, mutation, aliasing, strides, random numbers and modes are eager's.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_pruner as tp
from tests.compile.agreement import assert_equal, assert_same, check, observe, shares_storage
from torch_pruner import exc

pytestmark = pytest.mark.tvm


def randn(*shape: int, **kw: Any) -> torch.Tensor:
    return torch.randn(*shape, **kw)


def leaf(*shape: int, **kw: Any) -> torch.Tensor:
    return torch.randn(*shape, **kw).requires_grad_()


# Outputs, aliasing, strides: functions of an x of 4x6 and a y of 4x6.


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


# Random numbers.


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


# Modules.


class ConvNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


def conv_norm(seed: int = 0) -> ConvNorm:
    torch.manual_seed(seed)
    return ConvNorm()


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


# Weights that change after compilation.


def linear_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def in_place(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)


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


def by_data(model):
    for p in model.parameters():
        p.data = p.data + 1


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


# Modes of torch.


def mlp(x, w):
    return torch.relu(x @ w) + 1


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


# Dtypes and shapes.


def test_complex_numbers_stay_with_eager(backend):
    def fn(x):
        z = torch.complex(x, x * 2)
        return z * z.conj(), torch.view_as_real(z * 2).sum(), z.abs() + 1, torch.fft.rfft(x + 1)

    backend.check(fn, lambda: (randn(4, 6),), covers=False)
    backend.check(fn, lambda: (leaf(4, 6),), covers=False)


def test_complex_input(backend):
    backend.check(
        lambda z, x: (z @ z, x * 2, z.real + x),
        lambda: (randn(4, 4, dtype=torch.complex64), randn(4, 4)),
    )


INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_arithmetic(backend, dtype):
    def fn(a, b):
        return (
            a + b, a - b, a * b, a // b, a % b, a / b, -a, a.abs(), a.sum(), a.amax(0), a.cumsum(0),
            a == b, a < b, torch.minimum(a, b), a.clamp(2, 5), a.float().mean(), a & b, a | b,
            a ^ b, ~a, a << 1, a >> 1, a * 2.5, torch.where(a > b, a, b), a.to(torch.int64).sum(1),
            a.prod(1), a.argmax(0), a + True,
        )  # fmt: skip

    def make():
        low = 0 if dtype is torch.uint8 else -100
        a = torch.randint(low, 120, (5, 7)).to(dtype)
        b = torch.randint(1, 9, (5, 7)).to(dtype)
        return (a, b)

    backend.check(fn, make)


@pytest.mark.parametrize("dtype", [d for d in INTEGERS if d is not torch.uint8], ids=str)
def test_division_of_negative_integers(backend, dtype):
    def fn(a, b):
        rounded = torch.div(a, b, rounding_mode="trunc")
        return a // b, a % b, torch.remainder(a, b), torch.fmod(a, b), rounded

    def make():
        a = torch.randint(-100, 100, (9, 7)).to(dtype)
        b = torch.randint(1, 9, (9, 7)) * torch.randint(0, 2, (9, 7)).mul(2).sub(1)
        return (a, b.to(dtype))

    backend.check(fn, make)


def test_booleans(backend):
    def fn(a, b):
        return (
            a & b, a | b, ~a, a ^ b, a.sum(), a.any(1), a.all(0), a.float().mean(), a.int() + b,
            torch.where(a, 1.0, 2.0), a + b, a * b, a == b, a.to(torch.uint8) - 3,
            torch.cat([a, b]), a.logical_not(),
        )  # fmt: skip

    backend.check(fn, lambda: (randn(5, 7) > 0, randn(5, 7) > 0))


def test_mixed_dtypes_promote_as_in_eager(backend):
    def fn(i, f, h, b, s):
        return (
            i + f,
            h * f,
            i * h,
            b + i,
            s + h,
            i + s,
            f + 1,
            h + 1.5,
            i / 2,
            b * 2.0,
            torch.cat([i.float(), f]),
        )

    def make():
        i, f = torch.randint(0, 9, (4, 4)), randn(4, 4)
        return (i, f, f.bfloat16(), f > 0, torch.tensor(2.0, dtype=torch.float64))

    backend.check(fn, make)


def test_t_of_matrices_and_vectors(backend):
    def fn(x, v, w):
        return x.t() @ w, v.t() + 1, x.t().contiguous() * 2, (x @ x.t()).t()

    backend.check(fn, lambda: (randn(4, 6), randn(5), randn(4, 3)))


def test_scalar_tensors_in_and_out(backend):
    def fn(x, s):
        return x * s, s + 1, (s * s).sqrt(), s.expand(3), x.mean() + s

    backend.check(fn, lambda: (randn(3, 4), torch.rand(())))
    backend.check(fn, lambda: (leaf(3, 4), torch.rand(()).requires_grad_()))


@pytest.mark.parametrize("number", [3, 2.5, True, -1])
def test_python_numbers_as_arguments(backend, number):
    backend.check(lambda x, n: (x * n, x + n, n * 2), lambda: (randn(3, 4), number))


def test_python_numbers_that_change(backend):
    def fn(x, n):
        return x * n + (x**2) / (n + 1), n

    compiled = backend.compile(fn)
    for n in (1, 2, 3, 5, 8, 0.5, 0.25, 7.5):
        check(compiled, fn, lambda n=n: (randn(3, 4), n), calls=1, covers=False)


def test_high_rank_broadcasting(backend):
    def fn(a, b, c):
        return (a + b * c).sum((0, 3, 5)), a.expand(2, 3, 4, 5, 2, 3) * c

    backend.check(
        fn, lambda: (randn(2, 1, 4, 1, 2, 1), randn(3, 1, 5, 1, 3), randn(2, 3, 4, 5, 2, 3))
    )


def test_many_dimensions(backend):
    def fn(x):
        return x.permute(6, 0, 5, 1, 4, 2, 3).contiguous() * 2, x.sum((1, 3, 6)), x.flip(0, 6) + 1

    backend.check(fn, lambda: (randn(2, 3, 2, 3, 2, 3, 2),))


def test_no_tensor_inputs(backend):
    def fn():
        return torch.arange(12).view(3, 4).float().softmax(1) * torch.linspace(0, 1, 4)

    backend.check(fn, lambda: (), covers=False)


def test_constants_of_the_graph(backend):
    table = torch.arange(6.0)

    def fn(x):
        return (
            x * table + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
            torch.eye(6) @ x.t(),
            torch.full((2,), 7) * 2,
        )

    backend.check(fn, lambda: (randn(4, 6),))


def test_closure_tensor_changed_between_calls(backend):
    table = torch.ones(6)

    def fn(x):
        return x * table

    compiled = backend.compile(fn)
    x = randn(4, 6)
    for _ in range(3):
        assert_equal(compiled(x), fn(x))
        table.mul_(3)


# Operators that eager keeps.


def qr_in_the_middle(x):
    q, r = torch.linalg.qr((x + 1) * 2)
    return q @ r + 1, q.relu()


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


# Shapes that change.


@pytest.mark.parametrize("make", [randn, leaf], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [True, None, False])
def test_several_sizes(backend, dynamic, make):
    def fn(x, w):
        return torch.softmax(x @ w, -1), x.sum(0), x.shape[0]

    compiled = backend.compile(fn, dynamic=dynamic)
    for n in (3, 5, 8, 1, 3):
        check(compiled, fn, lambda n=n: (make(n, 4), make(4, 6)), calls=1, covers=False)


def test_marked_dynamic_dimension(backend):
    model = linear_model()
    compiled = backend.compile(model)
    for n in (3, 5, 2, 9):
        x = randn(n, 8)
        torch._dynamo.mark_dynamic(x, 0)
        assert_equal(compiled(x), model(x))


def test_batch_norm_with_changing_batch(backend):
    model, twin = conv_norm().train(), conv_norm().train()
    compiled = backend.compile(model, dynamic=True)
    for n in (2, 3, 5):
        check(compiled, twin, lambda n=n: (randn(n, 3, 6, 6),), calls=1, covers=False)
    assert_equal(model.norm.running_mean, twin.norm.running_mean)


# Life cycle.


def test_deepcopy_of_a_compiled_model(backend):
    model = linear_model()
    compiled = backend.compile(model)
    x = randn(2, 8)
    first = compiled(x)
    twin = copy.deepcopy(compiled)
    in_place(model)
    assert_equal(twin(x), first)
    assert_equal(compiled(x), model(x))
    other = copy.deepcopy(model)
    by_data(other)
    assert_equal(backend.compile(other)(x), other(x))


def test_two_models_of_one_architecture_share_no_weights(backend):
    one, two = linear_model(), linear_model()
    in_place(two)
    x = randn(2, 8)
    compiled = [backend.compile(m) for m in (one, two)]
    with torch.no_grad():
        for _ in range(2):
            for c, m in zip(compiled, (one, two), strict=True):
                assert_equal(c(x), m(x))


def test_reset_and_again(cold):
    x, w = randn(3, 4), randn(4, 5)
    for source in ("untuned", "cache"):
        assert_equal(cold.compile(mlp)(x, w), mlp(x, w))
        report = tp.last_report()
        assert {t.source for g in report.graphs for t in g.tasks} == {source}
        torch._dynamo.reset()


def test_stance_eager_on_recompile(backend):
    compiled = backend.compile(mlp)
    x, w = randn(3, 4), randn(4, 5)
    compiled(x, w)
    with torch.compiler.set_stance("force_eager"):
        assert_equal(compiled(x, w), mlp(x, w))
    with torch.compiler.set_stance("eager_on_recompile"):
        assert_equal(compiled(randn(7, 4), w).shape, torch.Size([7, 5]))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_equal(compiled(x, w), mlp(x, w))
        with pytest.raises(RuntimeError, match="recompil"):
            compiled(x.double(), w.double())


def test_output_lives_on_after_the_next_call(backend):
    compiled = backend.compile(mlp)
    x, w = randn(3, 4), randn(4, 5)
    first = compiled(x, w)
    kept = first.clone()
    compiled(x * 2, w)
    assert torch.equal(first, kept)
    assert not shares_storage(first, compiled(x, w))


def test_parameters_are_freed_with_their_model(backend):
    model = linear_model()
    compiled = backend.compile(model)
    with torch.no_grad():
        compiled(randn(2, 8))
        compiled(randn(2, 8))
    seen = [weakref.ref(p) for p in model.parameters()]
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert not any(ref() is not None for ref in seen)


def test_noise_where_sums_cancel_is_not_a_mismatch(backend):
    """The gradient of a bias before a normalisation is zero but for rounding, in eager as well."""
    model = conv_norm().train()
    compiled = backend.compile(model)
    compiled(randn(2, 3, 6, 6)).square().sum().backward()
    assert model.conv.bias.grad.abs().max() < 1e-4 < model.norm.weight.grad.abs().max()


def test_captured_by_export_style_fullgraph(backend):
    compiled = backend.compile(mlp, fullgraph=True)
    check(compiled, mlp, lambda: (leaf(3, 4), leaf(4, 5)))


# Options.


def failure_of(fn, *args) -> BaseException:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        fn(*args)
    return caught.value.inner_exception


BAD_OPTIONS = {
    "misspelt": ({"trails": 3}, "did you mean 'trials'"),
    "unknown": ({"zzz": 3}, "known options"),
    "wrong type": ({"trials": "many"}, "trials"),
    "out of range": ({"time_budget_s": -1}, "time_budget_s"),
    "no such choice": ({"effort": "huge"}, "effort"),
    "bool as int": ({"threads": True}, "threads"),
    "zero threads": ({"threads": 0}, "threads"),
    "not a bool": ({"strict": "yes"}, "strict"),
    "not a path": ({"cache_dir": 7}, "cache_dir"),
    "bad target": ({"target": {"arch": "x"}}, "target"),
    "rpc without tracker": ({"executor": "rpc"}, "tracker"),
}


@pytest.mark.parametrize(("options", "says"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_wrong_options_raise(options, says):
    compiled = torch.compile(mlp, backend="pruner", options=options)
    error = failure_of(compiled, randn(3, 4), randn(4, 5))
    assert isinstance(error, exc.OptionError)
    assert says in str(error)


MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode, shared_cache, monkeypatch):
    monkeypatch.setenv("TORCH_PRUNER_CACHE_DIR", str(shared_cache))
    monkeypatch.setenv(
        "TORCH_PRUNER_ON_MISS", "fallback"
    )  # modes set the effort, and tuning is not the point
    monkeypatch.setenv("TORCH_PRUNER_STRICT", "1")
    check(torch.compile(mlp, backend="pruner", mode=mode), mlp, lambda: (randn(3, 4), randn(4, 5)))


def test_fallback_error_refuses_what_is_not_compiled(backend):
    error = failure_of(backend.compile(qr_in_the_middle, fallback="error"), randn(4, 6))
    assert isinstance(error, exc.UnsupportedModel)
    assert "qr" in str(error)
    check(backend.compile(mlp, fallback="error"), mlp, lambda: (randn(3, 4), randn(4, 5)))


@pytest.mark.parametrize("make", [randn, leaf], ids=["inference", "training"])
def test_fallback_inductor(backend, make):
    compiled = backend.compile(qr_in_the_middle, fallback="inductor")
    check(compiled, qr_in_the_middle, lambda: (make(6, 4),), tolerance=1e-3)


def test_fallback_inductor_keeps_random_numbers_and_writes(backend):
    def fn(x):
        return F.dropout(x, 0.5, training=True) * 2

    check(backend.compile(fn, fallback="inductor"), fn, lambda: (randn(4, 6),))


class Canary(Exception):
    """Raised by an operator that must not run."""


def test_on_miss_error_raises_before_anything_runs_and_is_silent_when_warm(cold):
    ran = []

    @torch.library.custom_op("pruner_tests::canary", mutates_args=())
    def canary(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x.clone()

    canary.register_fake(torch.empty_like)

    def fn(x, w):
        x.add_(1)
        return torch.ops.pruner_tests.canary(x) @ w

    x, w = randn(3, 4), randn(4, 5)
    before = x.clone()
    error = failure_of(cold.compile(fn, on_miss="error"), x, w)
    assert isinstance(error, exc.CacheMiss)
    assert "torch-pruner tune" in str(error)
    assert not ran
    assert torch.equal(x, before)
    torch._dynamo.reset()
    check(cold.compile(fn), fn, lambda: (randn(3, 4), randn(4, 5)))
    torch._dynamo.reset()
    check(cold.compile(fn, on_miss="error"), fn, lambda: (randn(3, 4), randn(4, 5)))


def test_on_miss_error_names_the_differing_field(cold):
    x, w = randn(3, 4), randn(4, 5)
    cold.compile(mlp, threads=1)(x, w)
    torch._dynamo.reset()
    error = failure_of(cold.compile(mlp, threads=2, on_miss="error"), x, w)
    assert isinstance(error, exc.CacheMiss)
    assert "threads" in str(error)


def test_on_miss_error_of_a_backward_raises_before_the_forward_runs(cold):
    """Production must not serve a forward whose backward is missing."""
    x, w = leaf(3, 4), leaf(4, 5)
    with torch.no_grad():
        cold.compile(mlp)(x, w)
    torch._dynamo.reset()
    error = failure_of(cold.compile(mlp, on_miss="error"), x, w)
    assert isinstance(error, exc.CacheMiss)


def test_check_off(backend):
    check(backend.compile(mlp, check="off"), mlp, lambda: (leaf(3, 4), leaf(4, 5)))


def test_one_thread_and_two_threads(backend):
    for threads in (1, 2, 1):
        check(backend.compile(mlp, threads=threads), mlp, lambda: (randn(30, 40), randn(40, 50)))
        torch._dynamo.reset()
