"""In which order a training forward keeps values for its backward."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_pruner.dynamo.lower.activations import keep_channels_last

aten = torch.ops.aten


def convolved(x, w):
    return aten.convolution.default(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def made(x, w):
    y = convolved(x, w)
    return [aten.sum.default(aten.sigmoid.default(y)), aten.sigmoid.default(y)]


def read_alone(x, w):
    """As selective kernels weigh their paths: five dimensions become four."""
    y = aten.sum.dim_IntList(aten.mul.Tensor(x.unsqueeze(1), aten.sin.default(x.unsqueeze(1))), [1])
    return [convolved(y, w), y]


def of_a_part(x, w):
    """As gates are of halves of a convolution's channels."""
    part = aten.split_with_sizes.default(convolved(x, w), [2, 4], 1)[1]
    y = aten.sigmoid.default(part)
    return [aten.sum.default(y), y]


def of_tokens(x, w):
    y = aten.sin.default(aten.permute.default(convolved(x, w), [0, 2, 3, 1]))
    return [aten.sum.default(y), y]


def neither(x, w):
    y = aten.sin.default(x)
    return [convolved(aten.sum.dim_IntList(y.unsqueeze(1), [1]), w), y]


def weight(x, w):
    y = aten.mul.Tensor(w, 2.0)
    return [convolved(x, y), y]


@pytest.mark.parametrize(
    ("fn", "last"),
    [
        (made, True),
        (read_alone, True),
        (of_a_part, True),
        (of_tokens, False),
        (neither, False),
        (weight, False),
    ],
)
def test_what_convolutions_make_or_read_lies_channels_last(fn, last: bool) -> None:
    gm = make_fx(fn, tracing_mode="fake")(torch.randn(2, 6, 5, 5), torch.randn(6, 6, 3, 3))
    outputs = gm.graph.output_node().args[0]
    keep_channels_last(outputs, loose=[1], made=[outputs[1]])
    value = outputs[1].meta["val"]
    assert value.is_contiguous(memory_format=torch.channels_last) == last
    assert outputs[0].meta["val"].is_contiguous()


def test_values_that_a_caller_sees_stay() -> None:
    gm = make_fx(read_alone, tracing_mode="fake")(torch.randn(2, 6, 5, 5), torch.randn(6, 6, 3, 3))
    outputs = gm.graph.output_node().args[0]
    keep_channels_last(outputs, loose=[], made=list(gm.graph.nodes))
    assert outputs[1].meta["val"].is_contiguous()
