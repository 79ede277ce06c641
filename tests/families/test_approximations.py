"""Elementary functions under ``fast_math``: their largest errors, over float32s of every size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.emitting import schedule
from torch_pruner.codegen.build.lower import aligned, compile_kernel
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.precision import allow_fast
from torch_pruner.target import TargetSpec

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.tvm

STEP = 1021  # of the bits: four million of all float32s
LEAST = 2.0**-125.5  # of what is e**x: below it there may be 0
NUMEL = -(-(2**32) // STEP)
INF = math.inf

# operator -> (the function in float64, its largest relative error as the documentation says it)
FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "exp": (torch.exp, 2.0**-13.2),
    "sigmoid": (torch.sigmoid, 2.0**-13.2),
    "tanh": (torch.tanh, 2.0**-13.8),
    "erf": (torch.special.erf, 2.0**-15),
}


def one(op: str, numel: int) -> Graph:
    b = GraphBuilder()
    return b.finish([b.pointwise(op, b.input(0, (numel,), "float32"))])


def bell(numel: int) -> Graph:
    """exp(-x x): a power of what is not positive."""
    b = GraphBuilder()
    x = b.input(0, (numel,), "float32")
    square = b.pointwise("mul", b.pointwise("mul", x, x), b.const(-1.0, "float32"))
    return b.finish([b.pointwise("exp", square)])


def computed(spec: Graph, x: np.ndarray) -> np.ndarray:
    kernel = schedule(spec, "elementwise", {"vl": 16, "chunk": 64, "par": 0})
    given, out = aligned(x.shape, "float32"), aligned(x.shape, "float32")
    given[...] = x
    compile_kernel(kernel, TargetSpec.detect(1)).bind([given, out])()
    return out


def sweep() -> np.ndarray:
    return np.arange(0, 2**32, STEP, dtype=np.uint64).astype(np.uint32).view(np.float32)


def worst(got: np.ndarray, want: np.ndarray) -> float:
    """The largest relative error where the true result is a normal float32, or 0 is far away."""
    with np.errstate(all="ignore"):
        held = (np.abs(want) >= LEAST) & (np.abs(want) < 2.0**128)
        return float(np.max(np.abs(got[held].astype(np.float64) / want[held] - 1)))


@pytest.mark.parametrize("op", FUNCTIONS)
def test_errors_are_those_that_are_stated(op: str) -> None:
    function, bound = FUNCTIONS[op]
    x = sweep()
    got = computed(allow_fast(one(op, NUMEL)), x)
    want = function(torch.from_numpy(x).double()).numpy()
    assert bound / 2 < worst(got, want) <= bound
    small = np.abs(want) < LEAST
    assert np.all(np.abs(got[small]) <= 2 * LEAST)
    assert np.array_equal(np.isnan(got), np.isnan(x))


def test_powers_of_what_is_not_positive() -> None:
    x = sweep()
    got = computed(allow_fast(bell(NUMEL)), x)
    with np.errstate(all="ignore"):
        want = np.exp(-((x * x).astype(np.float64)))
    assert worst(got, want) <= 2.0**-13.2
    assert np.all(got[want < 2.0**-127] == 0)


def test_special_values_are_those_of_ieee() -> None:
    x = np.array([0.0, -0.0, INF, -INF, math.nan, 1e30, -1e30, 89.0], np.float32)
    known = {
        "exp": [1, 1, INF, 0, math.nan, INF, 0, INF],
        "sigmoid": [0.5, 0.5, 1, 0, math.nan, 1, 0, 1],
        "tanh": [0.0, -0.0, 1, -1, math.nan, 1, -1, 1],
        "erf": [0.0, -0.0, 1, -1, math.nan, 1, -1, 1],
    }
    for op, want in known.items():
        got = computed(allow_fast(one(op, 16)), np.resize(x, 16))[:8]
        np.testing.assert_array_equal(got, np.array(want, np.float32), err_msg=op)
        assert np.array_equal(np.signbit(got[:4]), np.signbit(np.array(want[:4]))), op


@pytest.mark.parametrize("op", FUNCTIONS)
def test_without_the_option_nothing_is_approximated(op: str) -> None:
    x = np.linspace(-5, 5, 4096, dtype=np.float32)
    got = computed(one(op, x.size), x)
    want = FUNCTIONS[op][0](torch.from_numpy(x).double()).numpy()
    assert worst(got, want) < 2.0**-21
