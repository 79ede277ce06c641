"""Attention of few queries as one kernel: code against the reference, models against eager."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torch_pruner as tp
from tests.emitting import schedule
from tests.families import kernels as K
from tests.families.test_random_kernels import check
from tests.unit.graph.attention_graphs import Case, attention, narrow
from tests.unit.graph.random_graphs import inputs_for
from torch_pruner.codegen.build.lower import aligned, compile_kernel
from torch_pruner.codegen.parts.lane_sums import _folds, _leaves
from torch_pruner.graph.attention import any_attention
from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.narrow import keep_narrow
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

POINT = {
    "vl": 16, "nq": 1, "kb": 32, "nr": 1, "nc": 2, "shares": 1, "ahead": 1, "tasks": 1
}  # fmt: skip
ONE = Case(queries=1, keys=128)
GROUPED = Case(queries=1, heads=8, kv=2, keys=197, depth=80, width=72)
SHARED = {"shares": 2, "tasks": 2}


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_sums_across_lanes_are_in_the_order_of_vectors(lanes: int) -> None:
    vectors = np.random.default_rng(0).standard_normal((lanes, lanes))
    rows = [vectors[i] for i in _leaves(lanes)]
    for low, high in _folds(lanes):
        pairs = [np.concatenate(pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
        rows = [pair[low] + pair[high] for pair in pairs]
    np.testing.assert_allclose(rows[0], vectors.sum(axis=1))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (ONE, {}),
        (replace(ONE, keys=17), {"kb": 16, "nc": 1}),
        (GROUPED, {"nq": 2, "nr": 4, "nc": 3, "ahead": 2}),
        (GROUPED, {**SHARED, "nq": 4, "nr": 3, "nc": 5}),
        (replace(GROUPED, kv=1, queries=3, causal=True), {**SHARED, "nq": 16, "nr": 8}),
        (replace(GROUPED, flat=True, batch=2), {"nq": 8, "kb": 64, "tasks": 2}),
        *(
            (replace(GROUPED, mask=mask, guard=True, batch=2, queries=2), {**SHARED, "nq": 2})
            for mask in ("add", "row", "heads", "bool")
        ),
        (replace(GROUPED, dtype="bfloat16", mask="add"), {"nq": 4, "nr": 4, "ahead": 0}),
        (replace(ONE, dtype="float64"), {"vl": 8}),
        (replace(ONE, depth=256, width=256), {"vl": 4, **SHARED}),
    ],
)
def test_kernels(case: Case, changes: dict[str, int]) -> None:
    outputs, expected, _ = K.run(attention(case), "decode_attention", {**POINT, **changes})
    assert K.error(outputs, expected) < (1e-2 if case.dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("case", [replace(GROUPED, mask="bool", guard=True), replace(ONE, keys=50)])
def test_random_decisions_write_nothing_else(case: Case) -> None:
    spec = attention(case)
    check(spec, inputs_for(spec), np.random.default_rng(3), 4)


@pytest.mark.parametrize("changes", [{"nq": 2, "nr": 2}, SHARED])
def test_int8_keys_and_values_with_scales(changes: dict[str, int]) -> None:
    spec = fuse(keep_narrow(narrow("int8")), few_queries=any_attention).kernels[0].spec
    outputs, expected, _ = K.run(spec, "decode_attention", {**POINT, **changes})
    assert K.error(outputs, expected) < 1e-5


def both(case: Case, changes: dict[str, int], change: Any) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel gives and what the reference gives, after ``change(q, k, v, mask)``."""
    spec = attention(case)
    arrays = [aligned(spec.nodes[i].shape, spec.nodes[i].dtype) for i in spec.inputs]
    rng = np.random.default_rng(0)
    for array in arrays[:3]:
        array[...] = rng.standard_normal(array.shape)
    for mask in arrays[3:]:
        mask[...] = mask.dtype == bool
    change(*arrays)
    with np.errstate(all="ignore"):
        expected = evaluate(spec, arrays)[0]
    kernel = schedule(spec, "decode_attention", {**POINT, **changes})
    out = aligned(kernel.outputs[0].shape, kernel.outputs[0].dtype)
    compile_kernel(kernel, TargetSpec.detect(2)).bind([*arrays, out])()
    return out, expected


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("mask", ["add", "bool"])
@pytest.mark.parametrize("changes", [{}, SHARED])
def test_rows_that_see_nothing(mask: str, guard: bool, changes: dict[str, int]) -> None:
    """Zeros where the graph guards them, else NaN; the other rows keep their values."""

    def hide(q: np.ndarray, k: np.ndarray, v: np.ndarray, m: np.ndarray) -> None:
        nothing = -math.inf if mask == "add" else False
        m[:, :, 1] = nothing
        m[:, :, 0, 40:90] = nothing

    out, expected = both(replace(ONE, queries=3, mask=mask, guard=guard), changes, hide)
    assert np.isnan(expected[:, :, 1]).all() != guard
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("changes", [{}, SHARED])
def test_values_that_are_no_numbers(value: float, changes: dict[str, int]) -> None:
    def put(q: np.ndarray, k: np.ndarray, v: np.ndarray, m: np.ndarray) -> None:
        m[0, 0, 0, 37] = value
        v[0, 3, 5] = value

    out, expected = both(replace(ONE, mask="row", guard=True), changes, put)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_blocks_that_a_mask_rules_out_are_not_read() -> None:
    """As with causal masks, what is not a number there does not reach the result."""

    def put(q: np.ndarray, k: np.ndarray, v: np.ndarray, m: np.ndarray) -> None:
        m[..., 30:] = False
        k[:, 64:], v[:, 96:] = math.nan, math.nan

    def clean(q: np.ndarray, k: np.ndarray, v: np.ndarray, m: np.ndarray) -> None:
        m[..., 30:] = False

    case = replace(ONE, mask="bool", guard=True)
    got, unmasked = both(case, {}, put)
    assert np.isnan(unmasked).any()
    np.testing.assert_allclose(got, both(case, {}, clean)[1], rtol=1e-4, atol=1e-5)


def compiled(fn: Any, *args: Any) -> Any:
    torch._dynamo.reset()
    run = torch.compile(fn, backend="pruner", options={"effort": "none", "strict": True})
    with torch.no_grad():
        out = run(*args)
    names = [t.sketch for g in tp.last_report().graphs for t in g.tasks]
    return out, names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_a_static_cache_as_eager(dtype: torch.dtype) -> None:
    """Of three positions, one program: what the mask leaves is known when it runs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 64).to(dtype) for h, n in ((8, 1), (2, 512), (2, 512)))

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(k.shape[2])[None, None, None] <= at
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    for position in (0, 100, 511):
        at = torch.tensor([position])
        got, names = compiled(step, q, k, v, at)
        assert "decode_attention" in names
        exact = step(q.double(), k.double(), v.double(), at)
        error, eager = ((t.double() - exact).abs().max() for t in (got, step(q, k, v, at)))
        assert error <= 4 * eager + 1e-7


def test_soft_capped_scores_with_a_window_as_eager() -> None:
    """As Gemma 2 spells it: capped scores, an added mask of lowest numbers, a float32 softmax."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 128) for h, n in ((8, 1), (2, 512), (2, 512)))
    mask = torch.zeros(1, 1, 1, 512)
    mask[..., 300:] = torch.finfo(torch.float32).min
    mask[..., :100] = torch.finfo(torch.float32).min

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        k, v = (x[:, :, None].expand(-1, -1, 4, -1, -1).reshape(1, 8, 512, 128) for x in (k, v))
        scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.1 / 50) * 50 + mask
        return torch.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2).contiguous()

    got, names = compiled(fn, q, k, v, mask)
    assert "decode_attention" in names
    torch.testing.assert_close(got, fn(q, k, v, mask), rtol=1e-5, atol=1e-5)
