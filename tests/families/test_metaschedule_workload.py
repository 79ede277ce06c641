"""Every operator as MetaSchedule sees it, unscheduled, against the reference interpreter."""

from __future__ import annotations

import pytest

from torch_pruner.graph import ops
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate
from torch_pruner.tuner.measure import check
from torch_pruner.tuner.measure.base import EvaluatorSpec

pytestmark = pytest.mark.tvm


def run_stock(spec, trace=""):
    from torch_pruner.tuner.measure._tvm import TvmBuilder

    kernel = TvmBuilder().build(
        spec, TargetSpec.detect(), 1, Candidate("metaschedule", trace=trace)
    )
    inputs = check.random_inputs(spec, 0)
    outputs = [check.aligned(*o) for o in kernel.outputs]
    kernel.bind([*map(check.aligned_copy, inputs), *outputs])()
    expected = check.expectations(spec, evaluate(spec, inputs), EvaluatorSpec())
    return check.mismatch(expected, outputs)


def views(b):
    x = b.input(0, (2, 3, 4), "float32")
    y = b.permute(b.reshape(x, (4, 6)), (1, 0))
    z = b.slice(y, (1, 0), (3, 2), (2, 2))
    z = b.append("flip", (z,), (3, 2), "float32", dims=(1,))
    return [b.broadcast(z, (5, 3, 2)), x]


def pad_and_cat(b):
    x, y = b.input(0, (2, 3), "float32"), b.input(1, (2, 1), "float32")
    both = b.append("cat", (x, y, x), (2, 7), "float32", dim=1)
    return [b.append("pad", (both,), (3, 9), "float32", lo=(1, 0), hi=(0, 2), value=2.5)]


def indexing(b):
    x, i = b.input(0, (5, 4), "float32"), b.input(1, (3, 2), "int64")
    taken = b.append("take", (x, i), (3, 2, 4), "float32", dim=0)
    negative = b.pointwise("sub", i, b.const(4, "int64"))
    return [
        taken,
        b.append("take", (x, negative), (3, 2, 4), "float32", dim=0),
        b.append("gather", (x, i), (3, 2), "float32", dim=1),
    ]


def iota(b):
    x = b.input(0, (3, 4), "int64")
    return [b.pointwise("mul", x, b.append("iota", (), (3, 4), "int64", dim=1))]


def reductions(b):
    x = b.input(0, (3, 5, 4), "float32")
    flags = b.pointwise("gt", x, b.const(0.5, "float32"))
    whole = b.cast(b.pointwise("mul", x, b.const(10.0, "float32")), "int32")
    return [
        b.reduce("sum", x, (0, 2)),
        b.reduce("prod", x, (1,)),
        b.reduce("max", b.pointwise("log", b.pointwise("sub", x, b.const(0.2, "float32"))), (1,)),
        b.reduce("min", whole, (2,)),
        b.reduce("any", flags, (1,)),
        b.reduce("all", flags, (0, 1, 2)),
    ]


def arg_reductions(b):
    x = b.input(0, (3, 50), "float32")
    holes = b.pointwise("log", b.pointwise("sub", x, b.const(3.0, "float32")))
    few = b.cast(x, "int32")
    return [
        b.append("argmax", (x,), (3,), "int64", axes=(1,)),
        b.append("argmin", (x,), (3,), "int64", axes=(1,)),
        b.append("argmax", (few,), (3,), "int64", axes=(1,)),
        b.append("argmin", (few,), (50,), "int64", axes=(0,)),
        b.append("argmax", (holes,), (3,), "int64", axes=(1,)),
    ]


def windows(b):
    x = b.input(0, (1, 2, 7, 8), "float32")
    attrs = {"kernel": (3, 2), "stride": (2, 1), "lo": (1, 0), "hi": (1, 1), "dilation": (1, 2)}
    return [
        b.append("window_max", (x,), (1, 2, 4, 7), "float32", **attrs),
        b.append("window_sum", (x,), (1, 2, 4, 7), "float32", **attrs),
        b.append("window_argmax", (x,), (1, 2, 4, 7), "int32", **attrs),
    ]


def matmul(b):
    x, w = b.input(0, (2, 5, 7), "float32"), b.input(1, (2, 7, 3), "float32", static=True)
    return [b.pointwise("tanh", b.matmul(x, w))]


def half_matmul(b):
    x, w = b.input(0, (5, 64), "float16"), b.input(1, (64, 3), "float16")
    return [b.matmul(x, w)]


def grouped_matmul(b):
    given = [b.input(0, (3, 20), "float32"), b.input(1, (3, 5), "int32", static=True)]
    given += [b.input(2, (2, 5), "bfloat16", static=True), b.input(3, (2, 5), "float32")]
    return [b.append("matmul_grouped", given, (3, 5), "float32", bits=4, group=16)]


def conv(b):
    x = b.input(0, (2, 4, 9, 8), "float32")
    w = b.input(1, (6, 2, 3, 2), "float32", static=True)
    return [b.append("conv", (x, w), (2, 6, 5, 9), "float32", stride=(2, 1), lo=(1, 2),
                     hi=(1, 1), dilation=(1, 2), groups=2)]  # fmt: skip


def depthwise_conv(b):
    x, w = b.input(0, (1, 4, 9), "float32"), b.input(1, (4, 1, 3), "float32")
    return [b.append("conv", (x, w), (1, 4, 9), "float32", stride=(1,), lo=(1,), hi=(1,),
                     dilation=(1,), groups=4)]  # fmt: skip


def conv_transpose(b):
    x = b.input(0, (1, 4, 5, 4), "float32")
    w = b.input(1, (4, 3, 3, 2), "float32")
    return [b.append("conv_transpose", (x, w), (1, 6, 10, 5), "float32", stride=(2, 1), lo=(1, 0),
                     dilation=(1, 1), groups=2)]  # fmt: skip


def channels_last(b):
    """A convolution, what is computed from it, and pooling, of data with channels last."""
    x = b.permute(b.input(0, (2, 9, 8, 4), "float32"), (0, 3, 1, 2))
    w = b.input(1, (6, 4, 3, 2), "float32", static=True)
    y = b.append("conv", (x, w), (2, 6, 5, 9), "float32", stride=(2, 1), lo=(1, 2), hi=(1, 1),
                 dilation=(1, 2), groups=1)  # fmt: skip
    other = b.permute(b.input(2, (2, 5, 9, 6), "float32"), (0, 3, 1, 2))
    z = b.pointwise("relu", b.pointwise("add", y, other))
    attrs = {"kernel": (2, 2), "stride": (1, 1), "lo": (1, 0), "hi": (0, 0), "dilation": (1, 1)}
    pooled = b.append("window_max", (z,), (2, 6, 5, 8), "float32", **attrs)
    return [b.permute(z, (0, 2, 3, 1)), b.permute(pooled, (0, 2, 3, 1))]


def softmax(b):
    x = b.input(0, (4, 33), "float32")
    shifted = b.pointwise("sub", x, b.reduce("max", x, (1,), keepdim=True))
    e = b.pointwise("exp", shifted)
    return [b.pointwise("div", e, b.reduce("sum", e, (1,), keepdim=True))]


def outputs_of_every_kind(b):
    """An input, a constant, one value twice."""
    x = b.input(0, (3,), "float32")
    y = b.pointwise("relu", x)
    return [x, b.const(2.0, "float32"), y, y]


GRAPHS = [
    views, pad_and_cat, indexing, iota, reductions, arg_reductions, windows, matmul, half_matmul,
    grouped_matmul,
    conv, depthwise_conv, conv_transpose, channels_last, softmax, outputs_of_every_kind,
]  # fmt: skip


@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
def test_graph(make) -> None:
    b = GraphBuilder()
    assert run_stock(b.finish(make(b))) == ""


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "bool"])
def test_pointwise_operators(dtype) -> None:
    """One graph with every pointwise operator that the dtype has."""
    b = GraphBuilder()
    x, y = b.input(0, (67,), dtype), b.input(1, (67,), dtype)
    names = {
        "bool": ("logical_not", "logical_and", "logical_or", "logical_xor", "eq"),
        "int32": ("neg", "abs", "add", "sub", "mul", "floordiv", "mod", "maximum", "lt", "sign"),
    }.get(dtype, ("neg", "exp", "tanh", "erf", "sigmoid", "relu", "add", "div", "maximum", "ge"))
    unary = (*ops.UNARY,)
    outs = [b.pointwise(n, x) if n in unary else b.pointwise(n, x, y) for n in names]
    if dtype != "bool":
        outs.append(b.pointwise("where", b.pointwise("lt", x, y), x, y))
        outs.append(b.cast(x, "float32"))
    assert run_stock(b.finish(outs)) == ""
