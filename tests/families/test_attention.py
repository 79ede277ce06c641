"""Attention as one kernel: generated code against the reference, compiled models against eager."""

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
from tests.unit.graph.attention_graphs import Case, attention
from tests.unit.graph.random_graphs import inputs_for
from torch_pruner.codegen.build.lower import aligned, compile_kernel
from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec, tiles_allowed

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(4)]

POINT = {
    "vl": 16, "nv": 2, "tm": 8, "tr": 8, "nc": 2, "kb": 64, "order": 0, "pack": 1, "turned": 0,
    "tasks": 2,
}  # fmt: skip
TURNED = {"turned": 1, "nc": 3}
NARROW = Case(queries=37, keys=197, depth=2, width=3)
RAGGED = Case(queries=37, keys=197, depth=80, width=80)


PAIRED = Case(queries=37, keys=197, depth=80, width=80, dtype="bfloat16")


@pytest.mark.skipif(not TargetSpec.detect(2).bf16_dot, reason="needs AVX512-BF16")
@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (replace(PAIRED, queries=64, keys=128), {"kb": 32}),
        (replace(PAIRED, kv=2, batch=2), {"tm": 12, "tr": 4, "nc": 3, "kb": 197}),
        (replace(PAIRED, queries=197, causal=True), {"kb": 32, "order": 1}),
        (replace(PAIRED, depth=18, mask="bool", guard=True, batch=2), {}),
        (replace(PAIRED, depth=24, width=40, causal=True), {"nv": 3, "tr": 6}),
        (replace(PAIRED, row=True, causal=True), {"tasks": 1}),
        (replace(PAIRED, mask="add", keys=51, width=16), {"kb": 51, "order": 1, "nc": 1}),
    ],
)
def test_products_of_pairs(case: Case, changes: dict[str, int]) -> None:
    """Numbers of both products two at a time; of an odd number of keys the last is alone."""
    spec = attention(case)
    if case.row:
        (spec,) = (k.spec for k in fuse(spec).kernels if len(k.outputs) == 2)
    point = {**POINT, "pack": 2, "pairs": 1, **changes}
    outputs, expected, _ = K.run(spec, "attention", point)
    assert K.error(outputs, expected) < 1e-2


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (Case(queries=64, keys=128, depth=64, width=64), {}),
        (RAGGED, {"tm": 12, "tr": 4, "nc": 3}),
        (replace(RAGGED, kv=2, batch=2), {"pack": 0, "nc": 4, "tr": 4}),
        (replace(RAGGED, flat=True), {"nv": 3, "tr": 6, "tasks": 1, "pack": 2}),
        (replace(RAGGED, depth=128, width=128, causal=True), {"tm": 6, "kb": 32, "order": 1}),
        (replace(RAGGED, queries=197, causal=True, kv=1), {"kb": 197, "tm": 16, "nv": 1}),
        (replace(RAGGED, queries=60, keys=17, causal=True), {"kb": 17}),
        *(
            (replace(RAGGED, mask=mask, guard=True, batch=2), {"order": order})
            for mask in ("add", "row", "heads", "bool")
            for order in (0, 1)
        ),
        (replace(RAGGED, queries=49, mask="heads", static=True, batch=2), {"tr": 6, "tm": 6}),
        (replace(RAGGED, mask="add", static=True, queries=20), {"order": 0, "vl": 8, "nv": 1}),
        (replace(RAGGED, mask="bool", static=True, kv=2), {"order": 1}),
        (replace(RAGGED, row=True, causal=True, batch=2), {}),
        (Case(queries=1), {"nv": 1, "tr": 4}),
        (Case(width=40, depth=24), {"pack": 2}),
        (Case(width=10), {"nc": 1}),
        (Case(dtype="bfloat16", mask="add"), {"order": 1}),
        (Case(dtype="bfloat16", mask="add"), {"order": 1, "pack": 2}),
        (Case(dtype="float64"), {"vl": 8}),
        (NARROW, {**TURNED, "nc": 2}),
        (replace(NARROW, width=13, depth=15), {**TURNED, "nc": 5, "pack": 2}),
        (replace(NARROW, width=1, depth=1, kv=2, batch=2), {**TURNED, "nc": 1, "pack": 0}),
        (replace(NARROW, causal=True, queries=197), {**TURNED, "nv": 1, "order": 1}),
        (replace(NARROW, queries=5, width=7, flat=True), {**TURNED, "nv": 1, "nc": 4}),
        (replace(NARROW, mask="heads", guard=True), {**TURNED, "pack": 2, "tasks": 1}),
        (replace(NARROW, mask="bool", guard=True, batch=2), {**TURNED, "order": 1}),
        (replace(NARROW, dtype="bfloat16", mask="add", width=6), {**TURNED, "order": 1}),
        (replace(NARROW, dtype="float64"), {**TURNED, "vl": 8}),
    ],
)
def test_kernels(case: Case, changes: dict[str, int]) -> None:
    spec = attention(case)
    if case.row:  # its order in memory is that of a reader
        (spec,) = (k.spec for k in fuse(spec).kernels if len(k.outputs) == 2)
    outputs, expected, _ = K.run(spec, "attention", {**POINT, **changes})
    assert K.error(outputs, expected) < (1e-2 if case.dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case(mask="bool", guard=True),
        Case(causal=True),
        Case(kv=2, mask="add", batch=2),
        Case(width=5, depth=3, mask="add", guard=True),
    ],
)
def test_random_decisions_write_nothing_else(case: Case) -> None:
    spec = attention(case)
    check(spec, inputs_for(spec), np.random.default_rng(3), 6)


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("mask", ["add", "bool"])
@pytest.mark.parametrize("width", [32, 4])
def test_rows_that_see_nothing(mask: str, guard: bool, width: int) -> None:
    """Zeros where the graph guards them, else NaN, and neighbours keep their values."""
    spec = attention(Case(mask=mask, guard=guard, width=width))
    arrays = [aligned(spec.nodes[i].shape, spec.nodes[i].dtype) for i in spec.inputs]
    rng = np.random.default_rng(0)
    for array in arrays[:3]:
        array[...] = rng.standard_normal(array.shape)
    arrays[3][...] = mask == "bool"
    nothing = mask == "add"
    arrays[3][:, :, 5] = -math.inf if nothing else False
    arrays[3][:, :, 8:] = np.where(rng.random(arrays[3][:, :, 8:].shape) < 0.5, 1, 0)
    if nothing:
        arrays[3][:, :, 8:][arrays[3][:, :, 8:] == 1] = -math.inf
    with np.errstate(all="ignore"):
        expected = evaluate(spec, arrays)[0]
    turned = TURNED if width < 16 else {}
    kernel = schedule(spec, "attention", {**POINT, "order": 1, **turned})
    out = aligned(kernel.outputs[0].shape, "float32")
    compile_kernel(kernel, TargetSpec.detect(2)).bind([*arrays, out])()
    assert np.isnan(expected[:, :, 5]).all() != guard
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


PREFIX = Case(queries=70, keys=96, depth=24, width=40, mask="add", guard=True, kv=2, batch=2)


def hidden(case: Case, changes: dict[str, int], spoil: str = "") -> tuple[Any, Any, Any]:
    """Outputs, expected ones, and the kernel, for a mask that hides keys after each query."""
    spec = attention(case)
    arrays = [aligned(spec.nodes[i].shape, spec.nodes[i].dtype) for i in spec.inputs]
    rng = np.random.default_rng(0)
    for array in arrays[:3]:
        array[...] = rng.standard_normal(array.shape)
    shape = arrays[3].shape
    seen = np.broadcast_to(np.arange(shape[3]) <= np.arange(shape[2])[:, None] - 3, shape)
    arrays[3][...] = np.where(seen, 0, -math.inf)
    if spoil:  # past the first tile of queries, which sees 29 keys at most
        where, value = spoil.split()
        arrays[int(where)][:, 60:, 5] = float(value)
    with np.errstate(all="ignore"):
        (expected,) = evaluate(spec, arrays)
    kernel = schedule(spec, "attention", {**POINT, "order": 1, **changes})
    out = aligned(kernel.outputs[0].shape, case.dtype)
    compile_kernel(kernel, TargetSpec.detect(2)).bind([*arrays, out])()
    return out, expected, kernel


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (PREFIX, {}),
        (PREFIX, {"pack": 0, "tm": 12, "tr": 4, "nc": 3}),
        (PREFIX, {"pack": 2, "nv": 1, "tasks": 3, "kb": 32}),
        (replace(PREFIX, guard=False, batch=1, heads=3, kv=3), {"tasks": 1, "nv": 3, "tr": 6}),
        (replace(PREFIX, dtype="bfloat16"), {"pack": 2}),
        (replace(PREFIX, dtype="float16", width=10, depth=8), {"nc": 1}),
        (replace(PREFIX, width=5, depth=2), TURNED),
    ],
)
def test_keys_that_a_mask_hides(case: Case, changes: dict[str, int]) -> None:
    """They are not visited, and the result is as if they were."""
    out, expected, kernel = hidden(case, changes)
    assert kernel.scratch[-1].dtype == "int32"  # how many keys a tile sees
    assert K.error([out], [expected]) < (1e-5 if case.dtype == "float32" else 1e-2)


@pytest.mark.parametrize("spoil", ["1 nan", "1 inf", "1 -1e38", "2 nan", "2 -inf", "2 1e38"])
@pytest.mark.parametrize(("pack", "turned"), [(0, 0), (2, 0), (1, 1)])
def test_what_is_not_finite_behind_a_mask_shows(spoil: str, pack: int, turned: int) -> None:
    case = replace(PREFIX, width=12) if turned else PREFIX
    out, expected, _ = hidden(case, {"pack": pack, "turned": turned}, spoil)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def compiled(fn: Any, *args: Any) -> Any:
    torch._dynamo.reset()
    run = torch.compile(fn, backend="pruner", options={"effort": "none", "strict": True})
    with torch.no_grad():
        out = run(*args)
    names = [t.sketch for g in tp.last_report().graphs for t in g.tasks]
    return out, names


def sdpa(case: Case, dtype: torch.dtype, **kw: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    shapes = [(case.heads, case.queries, case.depth)] + 2 * [(case.kv, case.keys, case.depth)]
    q, k, v = (torch.randn(case.batch, *s).to(dtype) for s in shapes)
    mask: tuple[torch.Tensor, ...] = ()
    shape = (case.batch, 1, case.queries, case.keys)
    if case.mask == "bool":
        mask = (torch.rand(shape) < 0.7,)
        mask[0][:, :, 3] = False
    elif case.mask:
        mask = (torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, -math.inf).to(dtype),)

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, mask[0] if mask else None, is_causal=case.causal, enable_gqa=True, **kw
        )

    return fn, (q, k, v, *mask)


@pytest.mark.parametrize("depth", [32, 64, 80, 128])
@pytest.mark.parametrize(
    "case",
    [Case(keys=197), Case(causal=True, queries=50), Case(mask="bool", kv=2), Case(mask="add")],
)
def test_sdpa_as_eager(case: Case, depth: int) -> None:
    """As near to float64 as eager float32 is, within a factor of 4."""
    fn, args = sdpa(replace(case, depth=depth), torch.float32)
    got, names = compiled(fn, *args)
    assert "attention" in names
    exact = fn(*(a.double() if a.is_floating_point() else a for a in args))
    error, eager = ((t.double() - exact).abs().max() for t in (got, fn(*args)))
    assert error <= 4 * eager + 1e-7


def test_sdpa_of_bfloat16() -> None:
    fn, args = sdpa(Case(depth=64, keys=1024), torch.bfloat16)
    got, names = compiled(fn, *args)
    assert "attention" in names
    exact = fn(*(a.double() for a in args))
    error, eager = ((t.double() - exact).abs().max() for t in (got, fn(*args)))
    assert error <= 4 * eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_written_out(heads: int, dtype: torch.dtype) -> None:
    """As transformers spells it: repeated heads, an added mask, a softmax in float32."""
    case = Case(kv=heads, mask="add", depth=64, queries=48, keys=48)
    _, args = sdpa(case, dtype)

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        times = q.shape[1] // k.shape[1]
        k, v = (
            x[:, :, None].expand(-1, -1, times, -1, -1).reshape(1, q.shape[1], 48, 64)
            for x in (k, v)
        )
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.125 + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v).transpose(1, 2).contiguous()

    args[3][:, :, 5] = torch.finfo(dtype).min
    got, names = compiled(fn, *args)
    tiles = TargetSpec.detect().bf16_tiles and tiles_allowed()
    assert ("attention" in names) == (dtype == torch.float32 or not tiles)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, fn(*args), rtol=tolerance, atol=tolerance)


def test_training_keeps_what_the_gradient_needs() -> None:
    fn, args = sdpa(Case(depth=64), torch.float32)
    leaves = [a.requires_grad_() for a in args]
    torch._dynamo.reset()
    run = torch.compile(fn, backend="pruner", options={"effort": "none", "strict": True})
    run(*leaves).square().sum().backward()
    got = [a.grad for a in leaves]
    for a in leaves:
        a.grad = None
    fn(*leaves).square().sum().backward()
    for mine, a in zip(got, leaves, strict=True):
        torch.testing.assert_close(mine, a.grad, rtol=1e-4, atol=1e-4)
