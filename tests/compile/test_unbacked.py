"""Sizes that depend on values, and graphs without a tensor: compiled or eager, never an error."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.tvm


@pytest.fixture(autouse=True)
def captured_values():
    torch._dynamo.reset()
    settings = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
    with torch._dynamo.config.patch(dict.fromkeys(settings, True)):
        yield


def doubled_indices(x):
    found = torch.nonzero(x)
    return torch.cat([found, found * 2]).sum() + x.sum() * 2


def extended(x):
    count = (x > 0).sum().item()
    torch._check(count >= 0)
    return torch.cat([x, torch.ones(count)]) * 2


def selected(x):
    positive = x[x > 0]
    return torch.cat([positive, positive]).relu() + 1, (x * 3).tanh()


def products(x):
    positive = x[x > 0]
    return torch.outer(positive, positive) @ positive[:, None], torch.exp(x)


@pytest.mark.parametrize("fn", [doubled_indices, extended, selected, products])
def test_sizes_that_depend_on_values(backend, fn):
    """``cat`` asked whether such a size is zero (``GuardOnDataDependentSymNode``)."""
    compiled = backend.compile(fn)
    for x in (torch.randn(6), torch.tensor([1.0, 2.0]), -torch.ones(4), torch.zeros(1)):
        torch.testing.assert_close(compiled(x), fn(x))


@pytest.mark.parametrize(
    "fn",
    [
        lambda: torch.mul(2.0, 3),
        lambda: torch.add(2, 3) * torch.ones(3),
        lambda: torch.true_divide(2, 4) + torch.arange(4),
    ],
)
def test_numbers_in_place_of_tensors(backend, fn):
    """An operator whose operands are all numbers ended in ``StopIteration``."""
    compiled = backend.compile(fn)
    for _ in range(2):
        torch.testing.assert_close(compiled(), fn())


def test_numbers_as_the_only_inputs(backend):
    def fn(a, b):
        return torch.full((4,), a * b + 1), torch.arange(a) * 2, torch.add(a, b)

    compiled = backend.compile(fn, dynamic=True)
    for args in ((2, 3), (4, 5), (0, 0), (7, 1)):
        torch.testing.assert_close(compiled(*args), fn(*args))
