"""Max pooling with positions: the same ones as eager's, borders, infinities and NaN included."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d, max_pool1d, max_pool2d, max_pool3d

from tests.families import kernels as K
from torch_pruner.graph.ir import Graph, GraphBuilder

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


def awkward(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Few different numbers, so there are ties; infinities, NaN and zeros of both signs."""
    x = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype.is_floating_point:
        flat = x.view(-1)
        flat[::7], flat[::31], flat[3::43], flat[5::47] = -0.0, math.nan, math.inf, -math.inf
        x[0, 0], x[0, 1, 1:] = -math.inf, math.nan
    return x


def assert_same(got: Any, expected: Any) -> None:
    """The same numbers, signs of zeros included, and strides."""
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
        if a.is_floating_point():
            assert torch.equal(a.nan_to_num().signbit(), b.nan_to_num().signbit())


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32], ids=str
)
@pytest.mark.parametrize(
    "window", [*WINDOWS, {"kernel_size": 7, "stride": 1, "padding": 3}], ids=str
)
def test_every_call_is_eagers(cold, window: dict[str, Any], dtype: torch.dtype, last: bool) -> None:
    def pool(x: torch.Tensor) -> Any:
        return max_pool2d(x, return_indices=True, **window)

    x = awkward((2, 18, 11, 37), dtype)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    ours = compiled(cold, pool)
    with torch.no_grad():
        for turn in range(3):
            given = x.roll(turn, 3)
            given = given.contiguous(memory_format=torch.channels_last) if last else given
            assert_same(ours(given), pool(given))


@pytest.mark.parametrize(
    ("shape", "pool"),
    [
        ((2, 5, 61), lambda x: max_pool1d(x, 3, 2, 1, return_indices=True)),
        ((2, 5, 61), lambda x: max_pool1d(x, 5, 5, 1, 2, ceil_mode=True, return_indices=True)),
        ((1, 2, 6, 7, 18), lambda x: max_pool3d(x, 3, 2, 1, return_indices=True)),
        ((1, 3, 5, 6, 9), lambda x: max_pool3d(x, (2, 3, 2), 1, 1, 2, return_indices=True)),
        ((1, 2, 9, 70), lambda x: max_pool2d(x, (4, 33), 1, (2, 16), return_indices=True)),
        ((3, 2, 40, 21), lambda x: max_pool2d(x, 40, 1, 20, return_indices=True)),
        ((1, 3, 9, 6), lambda x: max_pool2d(x, 2, (3, 3), return_indices=True)),
        ((1, 4, 8, 64), lambda x: (max_pool2d(x, 3, 4, 1), max_pool2d(x, (2, 6), 6))),
        ((1, 4, 8, 33), lambda x: (max_pool2d(x, 3, 2, 1).relu() * 2,)),
    ],
)  # fmt: skip
def test_other_windows(cold, shape: tuple[int, ...], pool: Any) -> None:
    ours = compiled(cold, pool)
    x = awkward(shape, torch.float32)
    with torch.no_grad():
        for turn in range(3):
            assert_same(ours(x.roll(turn, -1)), pool(x.roll(turn, -1)))


def test_means_along_lines(cold) -> None:
    def pool(x: torch.Tensor) -> Any:
        return (
            avg_pool2d(x, 3, 2, 1),
            avg_pool2d(x, (2, 5), (1, 3)),
            avg_pool2d(x, 2, ceil_mode=True),
        )

    ours, x = compiled(cold, pool), torch.randn(2, 3, 10, 45)
    for _ in range(3):
        for a, b in zip(ours(x), pool(x), strict=True):
            torch.testing.assert_close(a, b)


def located(shape: tuple[int, ...], *, stride: int, ops: tuple[str, ...], dtype: str) -> Graph:
    """Windows of three, one element of padding before and as many as are needed behind."""
    b = GraphBuilder()
    x = b.input(0, shape, dtype)
    size = [(d - 1) // stride + 1 for d in shape[1:]]
    attrs = {
        "kernel": (3,) * len(size), "stride": (stride,) * len(size), "lo": (1,) * len(size),
        "hi": (1,) * len(size), "dilation": (1,) * len(size),
    }  # fmt: skip
    outs = [
        b.append(op, (x,), (shape[0], *size), "int32" if op == "window_argmax" else dtype, **attrs)
        for op in ops
    ]
    return b.finish([b.cast(o, "int64") if b.dtype(o) == "int32" else o for o in outs])


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("vl", [1, 4, 16])
@pytest.mark.parametrize(
    "ops", [("window_max",), ("window_argmax",), ("window_max", "window_argmax"), ("window_sum",)]
)
def test_lines_of_windows(ops: tuple[str, ...], vl: int, stride: int) -> None:
    for shape, par in (((3, 5, 41), 1), ((2, 50), 0), ((2, 3, 4, 23), 1)):
        for dtype in ("float32", "bfloat16") if ops != ("window_sum",) else ("float32",):
            spec = located(shape, stride=stride, ops=ops, dtype=dtype)
            outputs, expected, _ = K.run(spec, "columns", {"vl": vl, "chunk": 4, "par": par})
            for got, want in zip(outputs, expected, strict=True):
                np.testing.assert_allclose(
                    got.astype(np.float64), want.astype(np.float64), rtol=1e-6
                )


def test_long_rows_are_copied_one_by_one() -> None:
    spec = located((2, 3, 5000), stride=2, ops=("window_max", "window_argmax"), dtype="float32")
    outputs, expected, _ = K.run(spec, "columns", {"vl": 16, "chunk": 4, "par": 1})
    for got, want in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(got, want)
