"""Functions of two float32s that are computed in vectors, against double precision."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.families import kernels as K
from torch_pruner.codegen.build.lower import aligned
from torch_pruner.graph.ir import GraphBuilder

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.tvm
Array = npt.NDArray[Any]
SPECIAL = (
    0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, np.inf, -np.inf, np.nan, 7.0, 2.5, -2.5,
    1e10, -8.0, 16777217.0, 1e38,
)  # fmt: skip


def kept(values: Array) -> Array:
    result = aligned(values.shape, "float32")
    result[...] = values
    return result


def computed(op: str, x: Array, y: Array) -> Array:
    b = GraphBuilder()
    spec = b.finish(
        [b.pointwise(op, b.input(0, x.shape, "float32"), b.input(1, y.shape, "float32"))]
    )
    decisions = {"vl": 16, "chunk": 8, "par": 0}
    outputs, _, _ = K.run(spec, "elementwise", decisions, inputs=[kept(x), kept(y)])
    return outputs[0]


def samples(low: float, high: float, signs: bool) -> tuple[Array, Array]:
    random = np.random.default_rng(0)
    x, y = (np.exp2(random.uniform(low, high, 20011)) for _ in range(2))
    if signs:
        x, y = (v * random.choice([-1.0, 1.0], v.size) for v in (x, y))
    return x.astype(np.float32), y.astype(np.float32)


def ulps(got: Array, exact: Array) -> float:
    rounded = exact.astype(np.float32)
    normal = np.isfinite(rounded) & (np.abs(rounded) > 1.2e-38)
    spacing = np.spacing(np.abs(rounded[normal])).astype(np.float64)
    return float((np.abs(got.astype(np.float64) - exact)[normal] / spacing).max())


@pytest.mark.parametrize(("low", "high"), [(-1.0, 4.0), (-0.01, 0.01), (-60.0, 1.0)])
def test_powers_are_within_one_ulp(low: float, high: float) -> None:
    x, y = samples(low, high, signs=False)
    for exponent in (y, -y, 100 * y):
        with np.errstate(over="ignore", under="ignore"):
            exact = np.power(x.astype(np.float64), exponent.astype(np.float64))
        assert ulps(computed("pow", x, exponent), exact) < 1


@pytest.mark.parametrize(("low", "high"), [(-2.0, 2.0), (-100.0, 100.0)])
def test_angles_are_within_four_ulp(low: float, high: float) -> None:
    x, y = samples(low, high, signs=True)
    assert ulps(computed("atan2", x, y), np.arctan2(x.astype(np.float64), y)) < 4


@pytest.mark.parametrize(("low", "high"), [(-2.0, 2.0), (-30.0, 30.0), (-148.0, 127.0)])
def test_remainders_are_exact(low: float, high: float) -> None:
    x, y = samples(low, high, signs=True)
    exact = np.fmod(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
    got = computed("fmod", x, y)
    assert np.array_equal(got, exact)
    assert np.array_equal(np.signbit(got), np.signbit(exact))


@pytest.mark.parametrize("divisor", [0.3, -7.0, 1e-40, 3e38])
def test_remainders_by_a_constant_are_exact(divisor: float) -> None:
    x, _ = samples(-140, 127, signs=True)
    b = GraphBuilder()
    given, constant = b.input(0, x.shape, "float32"), b.const(divisor, "float32")
    spec = b.finish([b.pointwise("fmod", given, constant)])
    outputs, _, _ = K.run(spec, "elementwise", {"vl": 16, "chunk": 8, "par": 0}, inputs=[kept(x)])
    exact = np.fmod(x.astype(np.float64), np.float64(np.float32(divisor)))
    assert np.array_equal(outputs[0], exact.astype(np.float32))


@pytest.mark.parametrize(
    ("op", "same"),
    [
        ("pow", torch.pow), ("atan2", torch.atan2), ("fmod", torch.fmod), ("mod", torch.remainder),
        ("floordiv", torch.floor_divide),
    ],
)  # fmt: skip
def test_special_cases(op: str, same: Callable[..., torch.Tensor]) -> None:
    pairs = np.array(list(itertools.product(SPECIAL, SPECIAL)), np.float32)
    x, y = pairs[:, 0].copy(), pairs[:, 1].copy()
    got, expected = computed(op, x, y), same(torch.tensor(x), torch.tensor(y)).numpy()
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(got), ~numbers)
    np.testing.assert_allclose(got[numbers], expected[numbers], rtol=5e-7, atol=1.5e-45)
    assert np.array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))
