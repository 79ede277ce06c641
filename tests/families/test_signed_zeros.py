"""Zeros keep their signs, infinities and NaN their places, as in eager."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-42, -1e-42, 0.5, -2.5, 3e38)


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor(SPECIAL).to(dtype)
    x, y = torch.meshgrid(values, values, indexing="ij")
    return x.reshape(-1).repeat(3), y.reshape(-1).repeat(3)


def with_constants(x, y):
    zero = torch.zeros_like(x)
    return [
        x / -zero, x / zero, x + 0.0, x + -0.0, 0.0 + x, x - 0.0, x - (-0.0), 0.0 - x, -0.0 - x,
        x * 0.0, x * -0.0, 0.0 / x, -0.0 / x, x + zero, x + -zero, x * zero, x * 1.0, x * -1.0,
    ]  # fmt: skip


def with_each_other(x, y):
    return [x + y, x - y, x * y, x / y, x - x, x / x, -x, x.neg().neg(), x.abs(), (-x).abs()]


def chosen(x, y):
    return [
        torch.where(x > 0, x, -0.0), torch.where(x > 0, 0.0, -0.0), x.masked_fill(x < 0, -0.0),
        torch.full_like(x, -0.0), torch.cat([x, -torch.zeros(3).to(x.dtype)]) + 0.0, x.sign(),
        torch.nn.functional.pad(x, (2, 2), value=-0.0), torch.relu(x), torch.fmax(x, y),
    ]  # fmt: skip


def elementary(x, y):
    return [x.log1p(), x.sin(), x.tanh(), x.erf(), x.floor(), x.ceil(), x.round(), x.trunc()]


def same(mine: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
    torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-37, equal_nan=True, msg=where)
    zero = (mine == 0) & (theirs == 0)
    assert torch.equal(torch.signbit(mine)[zero], torch.signbit(theirs)[zero]), where


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fn", [with_constants, with_each_other, chosen, elementary])
def test_every_pair_of_special_values(backend, fn, dtype) -> None:
    """``x / -torch.zeros_like(x)`` was +inf: the sign of a constant zero was lost."""
    torch._dynamo.reset()
    x, y = pairs(dtype)
    got = backend.compile(fn, check="off", library=False)(x, y)
    for k, (a, b) in enumerate(zip(got, fn(x, y), strict=True)):
        same(a, b, f"result {k} of {fn.__name__}")
