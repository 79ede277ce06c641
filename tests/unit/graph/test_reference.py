"""The reference interpreter against torch, and against the IR's own words where torch differs."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torch_pruner.graph import reference
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.ops import UNARY
from torch_pruner.graph.reference import evaluate, numpy_dtype

_SPECIAL = np.array([0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, np.nan, np.inf, -np.inf], np.float32)
_TORCH_NAMES = {"cast": None, "bitwise_not": None}


def apply(op: str, *arrays: np.ndarray, shape=None, dtype=None, **attrs) -> np.ndarray:
    builder = GraphBuilder()
    ids = [builder.input(i, a.shape, str(a.dtype)) for i, a in enumerate(arrays)]
    shape = np.broadcast_shapes(*(a.shape for a in arrays)) if shape is None else shape
    out = builder.append(op, ids, shape, dtype or str(arrays[0].dtype), **attrs)
    (result,) = evaluate(builder.finish([out]), arrays)
    return result


@pytest.mark.parametrize("op", [op for op in UNARY if op not in _TORCH_NAMES])
def test_unary_is_torch(op):
    dtype = "bool" if op in ("isnan", "isinf", "logical_not") else "float32"
    expected = getattr(torch, op)(torch.from_numpy(_SPECIAL))
    actual = apply(op, _SPECIAL, dtype=dtype)
    torch.testing.assert_close(torch.from_numpy(actual.copy()), expected, equal_nan=True)


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("floordiv", torch.floor_divide),
        ("mod", torch.remainder),
        ("fmod", torch.fmod),
        ("truncdiv", lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    ],
)
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_division_is_torch(op, function, dtype):
    a = np.array([7, -7, 7, -7, 6, -6, 0], dtype)
    b = np.array([3, 3, -3, -3, 3, -3, 5], dtype)
    expected = function(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    np.testing.assert_array_equal(apply(op, a, b), expected)


@pytest.mark.parametrize("op", ["floordiv", "mod", "truncdiv", "fmod"])
@pytest.mark.filterwarnings("error")
def test_integer_division_by_zero_does_not_trap(op):
    apply(op, np.array([1, -1], np.int64), np.array([0, 0], np.int64))


@pytest.mark.parametrize("op", ["maximum", "minimum"])
def test_extremes_propagate_nan(op):
    a, b = np.array([np.nan, 1], np.float32), np.array([1, np.nan], np.float32)
    assert np.isnan(apply(op, a, b)).all()


@pytest.mark.parametrize("op", ["max", "min", "argmax", "argmin"])
def test_reductions_find_the_first_nan(op):
    x = np.array([[1, np.nan, 3, np.nan]], np.float32)
    if op.startswith("arg"):
        assert apply(op, x, shape=(1,), dtype="int64", axes=(1,)).tolist() == [1]
    else:
        assert np.isnan(apply(op, x, shape=(1,), axes=(1,))).all()


def test_half_precision_rounds_at_each_node():
    bfloat16 = numpy_dtype("bfloat16")
    builder = GraphBuilder()
    x = builder.input(0, (1,), "bfloat16")
    one = builder.const(2.0**-9, "bfloat16")
    total = builder.pointwise("add", builder.pointwise("add", x, one), one)
    (result,) = evaluate(builder.finish([total]), [np.ones(1, bfloat16)])
    assert result.dtype == bfloat16
    assert float(result[0]) == 1.0


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_conv_is_torch(groups, stride, dilation):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 4, 9, 8)).astype(np.float32)
    w = rng.standard_normal((8, 4 // groups, 3, 2)).astype(np.float32)
    tensors = torch.from_numpy(x), torch.from_numpy(w)
    expected = F.conv2d(*tensors, None, stride, (2, 1), dilation, groups).numpy()
    two = {"stride": (stride,) * 2, "dilation": (dilation,) * 2, "groups": groups}
    actual = apply("conv", x, w, shape=expected.shape, lo=(2, 1), hi=(2, 1), **two)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    w = rng.standard_normal((4, 6 // groups if groups < 4 else 2, 3, 2)).astype(np.float32)
    tensors = torch.from_numpy(x), torch.from_numpy(w)
    extra = 1 if max(stride, dilation) > 1 else 0
    expected = F.conv_transpose2d(*tensors, None, stride, (1, 0), extra, groups, dilation).numpy()
    actual = apply("conv_transpose", x, w, shape=expected.shape, lo=(1, 0), **two)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_windows_are_torch(ceil_mode):
    x = np.random.default_rng(0).standard_normal((1, 2, 10, 9)).astype(np.float32)
    tensor = torch.from_numpy(x)
    expected = F.max_pool2d(tensor, 3, 2, 1, ceil_mode=ceil_mode).numpy()
    attrs = {"kernel": (3, 3), "stride": (2, 2), "lo": (1, 1), "hi": (2, 2), "dilation": (1, 1)}
    np.testing.assert_array_equal(apply("window_max", x, shape=expected.shape, **attrs), expected)
    expected = F.avg_pool2d(tensor, 3, 2, 1, ceil_mode=ceil_mode, divisor_override=1).numpy()
    actual = apply("window_sum", x, shape=expected.shape, **attrs)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fill", [0.0, -np.inf, np.nan])
@pytest.mark.parametrize("dilation", [1, 2])
def test_positions_of_windows_are_torch(dilation, fill):
    x = np.random.default_rng(0).integers(0, 3, (1, 2, 10, 9)).astype(np.float32)
    x[0, 1, 2:7, 1:6] = fill
    two = {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": dilation, "ceil_mode": True}
    _, expected = F.max_pool2d(torch.from_numpy(x), return_indices=True, **two)
    ends = {"lo": (1, 1), "hi": (2, 2), "dilation": (dilation,) * 2}
    actual = apply(
        "window_argmax", x, shape=tuple(expected.shape), dtype="int32", kernel=(3, 3),
        stride=(2, 2), **ends,
    )  # fmt: skip
    np.testing.assert_array_equal(actual, expected.numpy())


def test_take_and_gather_are_torch():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    index = np.array([[2, -1], [0, 1]], np.int64)
    np.testing.assert_array_equal(apply("take", x, index, shape=(2, 2, 2, 4), dim=1), x[:, index])
    index = np.array([[[0], [2]]], np.int64)
    expected = torch.gather(torch.from_numpy(x), 2, torch.from_numpy(index)).numpy()
    np.testing.assert_array_equal(apply("gather", x, index, shape=(1, 2, 1), dim=2), expected)


def test_updates_are_torch():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 4)).astype(np.float32)
    rows = rng.standard_normal((2, 3, 4)).astype(np.float32)
    index = np.array([4, 0, 4], np.int64)
    tensors = [torch.from_numpy(a) for a in (x, index, rows)]
    expected = torch.index_copy(tensors[0], 1, *tensors[1:]).numpy()
    attrs = {"dim": 1, "in_place": False}
    np.testing.assert_array_equal(apply("update", x, rows, index, shape=x.shape, **attrs), expected)
    where = np.array([1, -1], np.int64), np.array([-2, 0], np.int64)
    rows = rng.standard_normal((2, 4)).astype(np.float32)
    indices = [torch.from_numpy(i) for i in where]
    expected = torch.index_put(tensors[0], indices, torch.from_numpy(rows)).numpy()
    attrs["dim"] = 0
    np.testing.assert_array_equal(
        apply("update", x, rows, *where, shape=x.shape, **attrs), expected
    )


def test_views_and_padding():
    x = np.arange(12, dtype=np.int32).reshape(3, 4)
    sliced = apply("slice", x, shape=(2, 2), starts=(0, 1), steps=(2, 2))
    np.testing.assert_array_equal(sliced, x[0:3:2, 1:4:2])
    padded = apply("pad", x, shape=(4, 6), lo=(1, 0), hi=(0, 2), value=-1)
    np.testing.assert_array_equal(padded, np.pad(x, ((1, 0), (0, 2)), constant_values=-1))
    np.testing.assert_array_equal(apply("flip", x, shape=(3, 4), dims=(1,)), x[:, ::-1])


def test_rejects_inputs_that_do_not_match():
    builder = GraphBuilder()
    graph = builder.finish([builder.input(0, (2,), "float32")])
    with pytest.raises(ValueError, match=r"input 0 is float64\[2\], the graph declares float32"):
        evaluate(graph, [np.zeros(2)])


def test_rejects_a_declared_shape_that_is_wrong():
    with pytest.raises(ValueError, match="declared"):
        apply("cat", np.zeros(2, np.float32), np.zeros(2, np.float32), shape=(5,), dim=0)


def test_a_value_goes_when_nobody_reads_it_any_more(monkeypatch):
    """Or rounding the weights of a network would take several times their memory."""
    made: list[weakref.ref] = []
    most = 0

    def watched(node, args, inputs):
        nonlocal most
        result = step(node, args, inputs)
        made.append(weakref.ref(result))
        most = max(most, sum(r() is not None for r in made))
        return result

    step = reference._evaluate
    monkeypatch.setattr(reference, "_evaluate", watched)
    b = GraphBuilder()
    x = y = b.input(0, (4,), "float32")
    for _ in range(20):
        y = b.pointwise("neg", y)
    z = b.pointwise("add", y, x)
    given = np.arange(4, dtype=np.float32)
    first, again, last = evaluate(b.finish([z, z, x]), [given])
    assert (first == 2 * given).all()
    assert first is again
    assert (last == given).all()
    assert most <= 4
