"""Max pooling with positions: the same ones as eager's, borders, infinities and NaN included."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import max_pool2d, max_pool3d

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

WINDOWS: list[dict[str, Any]] = [
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
    {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "ceil_mode": True},
]


def compiled(cold, call):
    class Pool(torch.nn.Module):
        def forward(self, x):
            return call(x)

    return cold.compile(Pool(), effort="none", strict=True)


@pytest.mark.parametrize("fill", [None, -math.inf, math.nan])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_positions_and_gradients(cold, window: dict[str, Any], fill: float | None) -> None:
    x = torch.randn(2, 5, 11, 9, generator=torch.Generator().manual_seed(0))
    x[:, :, 2:4] = x[:, :, 2:3]  # of equal ones the first counts
    if fill is not None:
        x[0, 1], x[1, 2, 3:6, 2:7] = fill, fill

    def pool(x: torch.Tensor) -> Any:
        return max_pool2d(x, return_indices=True, **window)

    given = [x.clone().requires_grad_() for _ in range(2)]
    best, at = compiled(cold, pool)(given[0])
    expected, place = pool(given[1])
    assert torch.equal(at, place)
    assert torch.equal(best.nan_to_num(), expected.nan_to_num())
    share = torch.randn(best.shape, generator=torch.Generator().manual_seed(1))
    for value in (best, expected):
        (value.nan_to_num(0.0, 0.0, 0.0) * share).sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad)


def test_positions_in_three_dimensions(cold) -> None:
    x = torch.randn(1, 2, 6, 7, 8)

    def pool(x: torch.Tensor) -> Any:
        return max_pool3d(x, 3, 2, 1, return_indices=True)

    with torch.no_grad():
        assert torch.equal(compiled(cold, pool)(x)[1], pool(x)[1])
