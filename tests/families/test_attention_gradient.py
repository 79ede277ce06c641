"""Attention's gradient as one kernel: its code against the reference, training as in eager."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torch_pruner as tp
from tests.families import kernels as K
from tests.families.test_random_kernels import check
from tests.unit.graph.attention_gradient_graphs import GradientCase, attention_gradient
from tests.unit.graph.random_graphs import inputs_for
from torch_pruner.compiler import one_kernel
from torch_pruner.graph.attention_gradient import any_gradient
from torch_pruner.graph.fuse import fuse
from torch_pruner.target import TargetSpec

pytestmark = pytest.mark.tvm

POINT = {"vl": 8, "nv": 2, "qp": 2, "tm": 4, "tr": 6, "nc": 2, "kb": 48, "tasks": 2}
RAGGED = GradientCase(batch=1, queries=37, keys=101, depth=20, width=36)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (replace(RAGGED, causal=True), {}),
        (GradientCase(), {"kb": 50, "qp": 3}),
        (replace(RAGGED, queries=101, causal=True, mask="add"), {"tm": 6, "nc": 1}),
        (replace(RAGGED, mask="bool", apart=True), {"vl": 16, "qp": 1, "nv": 1}),
        (replace(RAGGED, mask="heads", queries=96, keys=96), {"tm": 12, "nv": 1, "nc": 1}),
        (replace(RAGGED, depth=5, width=7, queries=24), {"kb": 101, "nc": 3, "tasks": 1}),
        (replace(RAGGED, keys=37, queries=101, causal=True), {"kb": 37, "nv": 3, "tm": 3}),
    ],
)
def test_kernels(case: GradientCase, changes: dict[str, int]) -> None:
    spec = attention_gradient(case)
    outputs, expected, _ = K.run(spec, "attention_gradient", {**POINT, **changes})
    assert K.error(outputs, expected) < 1e-5


HALVES = replace(RAGGED, depth=24, dtype="bfloat16")


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (HALVES, {}),
        (replace(HALVES, dtype="float16", causal=True, flat=True), {"tm": 6}),
    ],
)
def test_half_precision(case: GradientCase, changes: dict[str, int]) -> None:
    """Results are rounded as they are written."""
    (kernel,) = fuse(attention_gradient(case), gradients=any_gradient).kernels
    outputs, expected, _ = K.run(kernel.spec, "attention_gradient", {**POINT, **changes})
    assert K.error(outputs, expected) < 1e-2


@pytest.mark.skipif(not TargetSpec.detect(2).bf16_dot, reason="needs AVX512-BF16")
@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (replace(HALVES, causal=True), {}),
        (GradientCase(dtype="bfloat16"), {"kb": 50, "qp": 3}),
        (replace(HALVES, queries=101, depth=64, causal=True, mask="add"), {"tm": 6, "nc": 1}),
        (replace(HALVES, mask="bool", apart=True), {"qp": 1, "nv": 1}),
        (replace(HALVES, mask="heads", queries=96, keys=96), {"tm": 12, "nv": 1, "nc": 1}),
        (replace(HALVES, keys=37, queries=101, causal=True), {"kb": 37, "nv": 3, "tm": 3}),
    ],
)
def test_products_of_pairs(case: GradientCase, changes: dict[str, int]) -> None:
    """Of an odd number of keys or queries the last is alone in its word."""
    (kernel,) = fuse(attention_gradient(case), gradients=any_gradient).kernels
    point = {**POINT, "vl": 16, "pairs": 1, **changes}
    outputs, expected, _ = K.run(kernel.spec, "attention_gradient", point)
    assert K.error(outputs, expected) < 1e-2


@pytest.mark.parametrize("case", [replace(RAGGED, mask="bool", causal=True, apart=True)])
def test_random_decisions_write_nothing_else(case: GradientCase) -> None:
    spec = attention_gradient(case)
    check(spec, inputs_for(spec), np.random.default_rng(3), 1)


class Heads(torch.nn.Module):
    """Two heads of 16 columns."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.mask = mask
        self.inner = torch.nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.view(*x.shape[:2], 2, 16).transpose(1, 2) for t in self.inner(x).chunk(3, dim=-1)
        )
        out = F.scaled_dot_product_attention(q, k, v, self.mask)
        return out.transpose(1, 2).reshape(x.shape)


@pytest.mark.rotated(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_as_in_eager(monkeypatch, tmp_path, dtype) -> None:
    """Rows that see nothing included."""
    monkeypatch.setattr(one_kernel, "_gradient_cheaper", lambda *_: True)
    one_kernel._known.clear()
    torch.manual_seed(0)
    mask = torch.zeros(2, 1, 41, 41).masked_fill(torch.rand(2, 1, 41, 41) < 0.5, -torch.inf)
    mask[:, :, 7] = -torch.inf
    model, x = Heads(mask).to(dtype), torch.randn(2, 41, 32, dtype=dtype)
    model.mask = model.mask.to(dtype)
    wanted, found = [], []
    torch._dynamo.reset()
    run = torch.compile(
        model, backend="pruner", options={"effort": "none", "cache_dir": str(tmp_path)}
    )
    for step, results in ((model, wanted), (run, found)):
        given = x.clone().requires_grad_()
        model.zero_grad()
        step(given).square().sum().backward()
        results += [given.grad, *(p.grad.clone() for p in model.parameters())]
    for a, b in zip(found, wanted, strict=True):
        bound = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(a, b, rtol=bound, atol=bound * float(b.abs().max()))
    sketches = {t.sketch for g in tp.last_report().graphs for t in g.tasks}
    assert "attention_gradient" in sketches
