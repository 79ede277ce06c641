"""Weights of four bits: words, scales, and the products that read them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from torch_pruner.graph import nibbles
from torch_pruner.graph.hoist import hoist_static
from torch_pruner.graph.int4 import GROUP, keep_groups, quantize_weights4
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate
from torch_pruner.graph.simplify import simplify

N, K = 80, 200  # neither a whole number of groups, nor of words of a vector


def linear(rows: int = 1, dtype: str = "float32", *, transposed: bool = True) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (rows, K), dtype)
    w = b.input(1, (N, K) if transposed else (K, N), dtype, static=True)
    return simplify(b.finish([b.matmul(x, b.permute(w, (1, 0)) if transposed else w)]))


@pytest.mark.parametrize("depth", [1, 8, 20, 64])
def test_words_hold_every_number(depth: int) -> None:
    levels = np.random.default_rng(0).integers(-8, 8, (depth, 5)).astype(np.int8)
    words = nibbles.packed(levels)
    assert words.shape == (-(-depth // 8), 5)
    np.testing.assert_array_equal(nibbles.unpacked(words, depth), levels)


@pytest.mark.parametrize("transposed", [True, False])
def test_each_weight_is_the_nearest_of_its_group(transposed: bool) -> None:
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((K, N)) * np.exp(rng.standard_normal(N))).astype(np.float32)
    w = w if not transposed else np.ascontiguousarray(w.T).T
    scales = nibbles.scales_of(w, 64)
    words = nibbles.words_of(w, scales, 64)
    weights = nibbles.weights_of(words, scales, None, K, 64)
    step = np.abs(scales)[np.arange(K) // 64]
    levels = np.arange(-8, 8)[:, None, None] * scales[np.arange(K) // 64]
    nearest = np.abs(levels - w).min(axis=0)
    np.testing.assert_allclose(np.abs(weights - w), nearest, atol=1e-6 * step.max())


def test_the_error_is_less_than_that_of_the_largest_magnitude() -> None:
    """Of normal weights: 0.81 % of their variance; 0.99 % where the largest is eight steps."""
    w = np.random.default_rng(0).standard_normal((64, 4000)).astype(np.float32)

    def error(scales: np.ndarray) -> float:
        words = nibbles.words_of(w, scales, 64)
        return float(np.square(nibbles.weights_of(words, scales, None, 64, 64) - w).mean())

    best = error(nibbles.scales_of(w, 64))
    assert best < 0.0082
    assert best < 0.83 * error(np.abs(w).max(axis=0, keepdims=True) / -8)
    rounded = nibbles.scales_of(w, 64).astype(ml_dtypes.bfloat16)
    assert error(rounded) < 1.005 * best, "scales of bfloat16"


def test_groups_of_zeros_stay_and_those_with_nan_are_nan() -> None:
    w = np.ones((K, N), np.float32)
    w[:, 3] = 0
    w[70, 5], w[0, 7] = np.nan, np.inf
    scales = nibbles.scales_of(w, 64)
    got = nibbles.weights_of(nibbles.words_of(w, scales, 64), scales, None, K, 64)
    assert (got[:, 3] == 0).all()
    assert np.isnan(got[64:128, 5]).all()
    assert np.isnan(got[:64, 7]).all()
    assert np.isfinite(got[:64, 5]).all()
    np.testing.assert_allclose(got[:, 0], 1, rtol=1e-6)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_read_words(dtype: str, transposed: bool) -> None:
    graph = linear(3, dtype, transposed=transposed)
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    x, w = (rng.standard_normal(s).astype(kind) for s in ((3, K), (K, N)))
    given = [x, w.T.copy() if transposed else w]
    rounded = keep_groups(quantize_weights4(graph))
    (product,) = [n for n in rounded.nodes if n.op == "matmul_grouped"]
    assert product.dtype == "float32"
    (got,) = evaluate(rounded, given)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    off = np.abs(got - exact).max() / np.abs(exact).max()
    assert 1e-3 < off < 0.2
    (ahead,) = evaluate(quantize_weights4(graph), given)
    assert np.abs(got.astype(np.float64) - ahead).max() < 1e-2 * np.abs(exact).max()
    hoisted = hoist_static(rounded)
    users = hoisted.graph.users()
    kept = [
        hoisted.graph.nodes[i]
        for i in hoisted.graph.inputs
        if users[i] and hoisted.graph.nodes[i].attr("static")
    ]
    assert sum(n.nbytes for n in kept) <= K * N / 2 + 2 * -(-K // GROUP) * N


def test_small_weights_stay() -> None:
    b = GraphBuilder()
    x, w = b.input(0, (4, K), "float32"), b.input(1, (K, 63), "float32", static=True)
    small = b.finish([b.matmul(x, w)])
    assert quantize_weights4(small) == small
