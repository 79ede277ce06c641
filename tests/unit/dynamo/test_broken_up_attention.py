"""Attention that torch captures as two products and a softmax in float32."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention

from torch_pruner.dynamo.capture.decompositions import decomposition_table
from torch_pruner.dynamo.lower.broken_up_attention import put_together

FUSED = torch.ops.aten.scaled_dot_product_attention.default
MASK = torch.ones(16, 12, dtype=torch.bool).tril(-1)  # nobody sees anything in the first row


def operands(dtype: torch.dtype = torch.float16, heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 16, 32), (2, heads, 12, 32), (2, heads, 12, 24)]
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def captured(function, *arguments: object) -> fx.GraphModule:
    def broken_up(*arguments: object) -> object:
        with sdpa_kernel(SDPBackend.MATH):
            return function(*arguments)

    table = decomposition_table()
    return make_fx(broken_up, decomposition_table=table, tracing_mode="fake")(*arguments)


def fused(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=FUSED)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"scale": 0.5}])
def test_is_one_operator_again(dtype: torch.dtype, options: dict[str, object]) -> None:
    given = operands(dtype)
    gm = captured(lambda q, k, v: attention(q, k, v, **options) + 1, *given)
    (node,) = fused(whole := put_together(gm))
    assert node.meta["val"].dtype == dtype
    left = [n.meta["val"] for n in whole.graph.nodes if n.op == "call_function"]
    assert not [v for v in left if v.dtype == torch.float32]
    torch.testing.assert_close(whole(*given), gm(*given), rtol=1e-2, atol=1e-2)


def test_heads_that_are_repeated_stay_so() -> None:
    """With a mask, too: of a row that sees nothing zeros remain."""
    given = [*operands(heads=2), MASK]
    gm = captured(lambda q, k, v, m: attention(q, k, v, m, enable_gqa=True), *given)
    (node,) = fused(whole := put_together(gm))
    assert [n.meta["val"].shape[1] for n in node.args[:3]] == [4, 2, 2]
    torch.testing.assert_close(whole(*given), gm(*given), rtol=1e-2, atol=1e-2)


def weights_too(q, k, v):
    scores = (q.float() * 0.5) @ (k.float() * 0.5).transpose(-2, -1)
    weights = torch.ops.aten._safe_softmax(scores, -1)
    return (weights @ v.float()).to(q.dtype), weights


def over_queries(q, k, v):
    scores = q.float() @ k.float().transpose(-2, -1)
    return (torch.ops.aten._safe_softmax(scores, -2) @ v.float()).to(q.dtype)


def wide_queries(q, k, v):
    scores = (q.float() + 1e-5) @ k.float().transpose(-2, -1)
    return (torch.ops.aten._safe_softmax(scores, -1) @ v.float()).to(q.dtype)


def wide_mask(q, k, v):
    return attention(q, k, v, is_causal=True)  # added in float32


@pytest.mark.parametrize("function", [weights_too, over_queries, wide_queries, wide_mask])
def test_others_stay_as_they_are(function) -> None:
    gm = captured(function, *operands())
    assert put_together(gm) is gm


def test_float32_stays_as_it_is() -> None:
    gm = captured(attention, *operands(torch.float32))
    assert put_together(gm) is gm
