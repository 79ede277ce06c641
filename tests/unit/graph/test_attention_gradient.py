"""Which gradients of attention are recognised, and when one kernel is taken for five."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.graph.attention_gradient_graphs import GradientCase, attention_gradient
from torch_pruner.compiler.one_kernel import gradient_is_cheaper
from torch_pruner.graph.attention_gradient import any_gradient, attention_gradients, gradient_of
from torch_pruner.graph.fuse import fuse
from torch_pruner.target import TargetSpec

CPU = TargetSpec.from_dict({"kind": "llvm", "mcpu": "znver3"}, 2)


@pytest.mark.parametrize(
    "case",
    [
        GradientCase(),
        GradientCase(mask="bool", causal=True),
        GradientCase(mask="add", flat=True),
        GradientCase(mask="heads", apart=True),
        GradientCase(dtype="bfloat16", causal=True),
        GradientCase(dtype="float16", flat=True),
    ],
)
def test_it_is_one_kernel(case: GradientCase) -> None:
    kernels = fuse(attention_gradient(case), gradients=any_gradient).kernels
    found = [f for k in kernels if (f := gradient_of(k.spec)) is not None]
    (gradient,) = found
    assert (gradient.queries, gradient.keys) == (case.queries, case.keys)
    assert gradient.causal == case.causal
    assert len(gradient.spread) == 2
    (kernel,) = (k for k in kernels if gradient_of(k.spec) is not None)
    assert [kernel.spec.nodes[o].dtype for o in kernel.spec.outputs] == [case.dtype] * 3


@pytest.mark.parametrize(
    "changes",
    [{"seen": True}, {"dtype": "float64"}, {"queries": 8}, {"depth": 2, "width": 2}],
)
def test_it_is_not_where_something_is_missing(changes) -> None:
    graph = attention_gradient(replace(GradientCase(), **changes))
    assert not list(attention_gradients(graph, graph.users()))


@pytest.mark.parametrize(
    ("case", "one"),
    [
        (GradientCase(4, 8, 1024, 1024, 16, 16), True),  # 2.4 times as fast on a Zen 3
        (GradientCase(4, 12, 128, 128, 64, 64), False),  # 0.8 times
        (GradientCase(4, 12, 128, 128, 64, 64, causal=True), True),  # half of it is not computed
        (GradientCase(1, 1, 256, 256, 32, 32), False),  # one head for two threads
    ],
)
def test_estimates_decide(case: GradientCase, one: bool) -> None:
    kernels = fuse(attention_gradient(case), gradients=gradient_is_cheaper(CPU, 2)).kernels
    assert (len(kernels) == 1) == one
