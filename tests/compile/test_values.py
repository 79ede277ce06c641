"""Dtypes, shapes and scalars: compiled functions give eager's values and types."""

from __future__ import annotations

import pytest
import torch

from tests.compile.agreement import assert_equal, check
from tests.compile.functions import (
    leaf,
    randn,
)

pytestmark = pytest.mark.tvm


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


def test_positions_of_one_token(backend) -> None:
    """Computed from nothing but positions, and wrapped as an index is: TVM refused the code."""

    def fn(x):
        at = torch.arange(1)
        wrapped = torch.where(at < 0, at + 1, at)
        return x, wrapped + wrapped

    backend.check(fn, lambda: (randn(3),))


@pytest.mark.parametrize("width", [9, 12])
def test_flipped_values_that_are_repeated(backend, width):
    """TVM's arithmetic of indices is wrong about what is subtracted from a number and divided."""

    def fn(x):
        twice = torch.cat([x, x], -1)
        return (
            twice.flip(-1).cumsum(-1), x.repeat(1, 3).flip(1) * 2,
            x.expand(2, 7, width).flip(0, 2) + 1,
            twice.flip(-1).reshape(-1, 2, width).exp(), twice.flip(-1)[:, 1:].reshape(-1) - 1,
        )  # fmt: skip

    backend.check(fn, lambda: (randn(7, width),))


def test_what_is_written_over_whole(backend):
    def fn(x, y):
        x[..., 0] = 0.25
        y[:] = y.shape[0]
        return x * 2, y + 1

    backend.check(fn, lambda: (randn(3, 20, 1), randn(5)))


def test_padding_around_nothing(backend):
    def fn(x):
        cut = torch.nn.functional.pad(torch.relu(x), (-1, 1), value=0.5)
        return cut.softmax(0), cut * 2

    backend.check(fn, lambda: (leaf(40, 1),))


def test_a_stack_of_very_many(backend):
    def fn(x):
        return torch.stack([row * 2 for row in x.unbind(0)]), torch.tanh(x)

    backend.check(fn, lambda: (randn(160, 3),))


def test_parts_put_together_that_are_looked_up(backend):
    """Which part an element is of depends on data, for each lane of a vector."""

    def fn(x, y, at):
        total = x + torch.cat([x.new_zeros(16), (y[0] + y[1]).view(1)])
        return torch.where(at < 17, total[at.clamp(0, 16)], 0).neg()

    def make():
        half = torch.float16
        return randn(17, dtype=half), randn(2, dtype=half), torch.randint(0, 20, (33,))

    backend.check(fn, make)
