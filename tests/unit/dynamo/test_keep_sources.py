"""What a training forward keeps in place of copies that operators in place keep."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_pruner.dynamo.lower.activations import keep_sources

aten = torch.ops.aten


def computed(x):
    y = aten.sin.default(x)
    return [aten.sigmoid.default(y), aten.clone.default(y)]


def of_several(x):
    y = aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5)[0]
    return [aten.sigmoid.default(y), aten.clone.default(y)]


def of_a_view(x):
    y = aten.permute.default(aten.sin.default(x), [0, 2, 1])
    return [aten.sigmoid.default(y), aten.clone.default(y, memory_format=torch.preserve_format)]


def seen(x):
    y = aten.sin.default(x)
    return [y, aten.clone.default(y)]


def seen_as_a_view(x):
    y = aten.sin.default(x)
    return [aten.reshape.default(y, [6, 4]), aten.clone.default(y)]


def seen_as_what_may_be_a_view(x):
    y = aten.sin.default(x)
    return [aten._unsafe_view.default(y, [6, 4]), aten.clone.default(y)]


def given(x):
    return [aten.sigmoid.default(x), aten.clone.default(x)]


def given_as_a_view(x):
    y = aten.reshape.default(x, [6, 4])
    return [aten.sigmoid.default(y), aten.clone.default(y)]


def in_another_order(x):
    y = aten.permute.default(aten.sin.default(x), [0, 2, 1])
    return [aten.sigmoid.default(y), aten.clone.default(y, memory_format=torch.contiguous_format)]


@pytest.mark.parametrize(
    ("fn", "instead"),
    [
        (computed, True),
        (of_several, True),
        (of_a_view, True),
        (seen, False),
        (seen_as_a_view, False),
        (seen_as_what_may_be_a_view, False),
        (given, False),
        (given_as_a_view, False),
        (in_another_order, False),
    ],
)
def test_copies_are_kept_only_where_somebody_else_may_write(fn, instead: bool) -> None:
    x = torch.randn(2, 3, 4)
    gm = make_fx(fn, tracing_mode="fake")(x)
    keep_sources(gm, loose=[1])
    copies = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert bool(copies) != instead
    for ours, theirs in zip(gm(x), fn(x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert ours.stride() == theirs.stride()


def test_copies_that_a_caller_sees_stay() -> None:
    gm = make_fx(computed, tracing_mode="fake")(torch.randn(4))
    before = gm.code
    keep_sources(gm, loose=[])
    assert gm.code == before
