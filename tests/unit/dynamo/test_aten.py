"""What ATen runs in place of kernels gives the reference's results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.unit.graph.attention_graphs import Case, attention
from torch_pruner.devices import aten
from torch_pruner.devices.aten_attention import attention_call
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate
from torch_pruner.tuner.measure.check import random_inputs

if TYPE_CHECKING:
    from collections.abc import Callable


def softmax(b: GraphBuilder) -> list[int]:
    x = b.input(0, (3, 4, 5), "float32")
    e = b.pointwise("exp", b.pointwise("sub", x, b.reduce("max", x, [2], keepdim=True)))
    return [b.pointwise("div", e, b.reduce("sum", e, [2], keepdim=True))]


def reductions(b: GraphBuilder) -> list[int]:
    x = b.input(0, (3, 4, 5), "float32")
    mask = b.input(1, (3, 4, 5), "bool")
    found = [b.reduce(op, x, [0, 2]) for op in ("sum", "prod", "max", "min")]
    found += [b.reduce(op, mask, [0, 1]) for op in ("any", "all")]
    return found + [b.reduce(op, x, [1]) for op in ("argmax", "argmin")]


def half(b: GraphBuilder) -> list[int]:
    return [b.reduce("sum", b.input(0, (3, 40), "float16"), [1])]


def moved(b: GraphBuilder) -> list[int]:
    x, at = b.input(0, (6, 4), "float32"), b.input(1, (2, 3), "int64")
    rows = b.append("take", [x, at], (2, 3, 4), "float32", dim=0)
    near = b.append("gather", [x, at], (2, 3), "float32", dim=0)
    both = b.append("cat", [x, x], (6, 8), "float32", dim=1)
    wide = b.append("pad", [x], (7, 7), "float32", lo=(1, 0), hi=(0, 3), value="-inf")
    back = b.append("flip", [x], (6, 4), "float32", dims=(1,))
    return [rows, near, both, wide, back]


def counted(b: GraphBuilder) -> list[int]:
    x = b.input(0, (3, 4), "float32")
    line = b.append("iota", [], (3, 4), "int64", dim=1)
    return [b.pointwise("add", x, b.cast(line, "float32"))]


@pytest.mark.parametrize("make", [softmax, reductions, half, moved, counted])
def test_it_is_the_reference(make: Callable[[GraphBuilder], list[int]]) -> None:
    builder = GraphBuilder()
    spec = builder.finish(make(builder))
    assert aten.runs(spec)
    arrays = random_inputs(spec, 0)
    got = aten.run_spec(spec, [torch.from_numpy(a.copy()) for a in arrays])
    for mine, want in zip(got, evaluate(spec, arrays), strict=True):
        assert mine.numpy().dtype == want.dtype
        torch.testing.assert_close(mine, torch.from_numpy(want.copy()), rtol=1e-3, atol=1e-5)


ATTENTIONS = {
    "plain": Case(),
    "rows that differ in length": Case(batch=2, queries=5, keys=40, depth=16, width=24),
    "causal": Case(queries=20, keys=20, causal=True),
    "what is added": Case(mask="add"),
    "a condition": Case(mask="bool", guard=True),
    "heads of the same keys": Case(kv=2, mask="heads"),
    "flat": Case(flat=True),
    "half precision": Case(dtype="float16"),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_one_operator(name: str, monkeypatch) -> None:
    spec, calls = attention(ATTENTIONS[name]), []
    fused = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: object, **options: object) -> torch.Tensor:
        calls.append(options)
        return fused(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    arrays = random_inputs(spec, 0)
    (mine,) = aten.run_spec(spec, [torch.from_numpy(a.copy()) for a in arrays])
    (want,) = evaluate(spec, arrays)
    wide = torch.from_numpy(np.asarray(want, np.float32).copy())
    tolerance = 2e-3 if ATTENTIONS[name].dtype == "float16" else 1e-5
    torch.testing.assert_close(mine.float(), wide, rtol=tolerance, atol=tolerance)
    assert [options["is_causal"] for options in calls] == [ATTENTIONS[name].causal]
    assert aten.competes(spec)


@pytest.mark.parametrize(
    "case",
    [
        Case(causal=True, mask="add", queries=20, keys=20),
        Case(mask="add", dtype="bfloat16"),
        Case(row=True),
    ],
    ids=["two masks", "a bias of more digits", "sums that are read"],
)
def test_other_attention_is_not(case: Case) -> None:
    assert attention_call(attention(case)) is None


def test_only_products_compete() -> None:
    b = GraphBuilder()
    spec: Graph = b.finish(softmax(b))
    assert aten.runs(spec)
    assert not aten.competes(spec)
    assert aten.AtenVendor().latency_s(spec) is None


def test_what_it_does_not_run() -> None:
    """Integers are not multiplied on GPUs; nothing says where a graph without inputs would be."""
    b = GraphBuilder()
    x, w = b.input(0, (4, 4), "int32"), b.input(1, (4, 4), "int32")
    assert not aten.runs(b.finish([b.matmul(x, w)]))
    b = GraphBuilder()
    assert not aten.runs(b.finish([b.append("iota", [], (3,), "int64", dim=0)]))
