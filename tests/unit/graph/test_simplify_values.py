"""Simplified graphs give the same bits: signs of zeros, infinities, NaN, denormals, extremes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate, numpy_dtype
from torch_pruner.graph.simplify import simplify

SPECIAL = (
    0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -4.0, math.inf, -math.inf, math.nan, 1e-42, -1e-42,
    3.4028235e38, -2.5, 2.5, 1.1754944e-38,
)  # fmt: skip
WHOLE = (0, 1, -1, 2, -3, 127, -128)
FLOAT_UNARY = (
    "neg", "abs", "sign", "relu", "floor", "ceil", "trunc", "round", "sqrt", "reciprocal",
)  # fmt: skip
FLOAT_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")
INT_UNARY = ("neg", "abs", "sign", "relu", "floor", "round", "bitwise_not")
INT_BINARY = ("add", "sub", "mul", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor")
SHAPE = (len(SPECIAL), len(SPECIAL))


def leaves(dtype: str) -> list[np.ndarray]:
    values = np.array(SPECIAL if dtype.startswith(("float", "bfloat")) else (*WHOLE,) * 4)
    values = np.resize(values, SHAPE[0]).astype(numpy_dtype(dtype))
    across, along = np.broadcast_arrays(values[:, None], values[None, :])
    return [np.ascontiguousarray(across), np.ascontiguousarray(along)]


@st.composite
def expressions(draw: st.DrawFn, dtype: str) -> Graph:
    """A few operators on two inputs that meet every pair of values, constants and views."""
    b = GraphBuilder()
    floats = dtype.startswith(("float", "bfloat"))
    values = [b.input(0, SHAPE, dtype), b.input(1, SHAPE, dtype)]
    unary, binary = (FLOAT_UNARY, FLOAT_BINARY) if floats else (INT_UNARY, INT_BINARY)
    constants = SPECIAL if floats else WHOLE[: 5 if dtype == "uint8" else None]
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(("unary", "binary", "constant", "where", "cast", "view")))
        x = draw(st.sampled_from(values))
        if kind == "unary":
            made = b.append(draw(st.sampled_from(unary)), (x,), SHAPE, dtype)
        elif kind == "cast":
            through = draw(
                st.sampled_from(("float64", "float32") if floats else ("int64", "int32"))
            )
            made = b.cast(b.cast(x, through), dtype)
        elif kind == "view":
            turned = b.append("flip", (x,), SHAPE, dtype, dims=(draw(st.sampled_from((0, 1))),))
            made = b.permute(turned, draw(st.sampled_from(((0, 1), (1, 0)))))
        else:
            number = draw(st.sampled_from(constants))
            full = b.broadcast(b.const(abs(number) if dtype == "uint8" else number, dtype), SHAPE)
            y = full if kind == "constant" else draw(st.sampled_from([*values, full]))
            pair = (x, y) if draw(st.booleans()) else (y, x)
            if kind == "where":
                test = b.pointwise(draw(st.sampled_from(("lt", "eq", "ge"))), *pair)
                made = b.pointwise("where", test, *pair)
            else:
                made = b.append(draw(st.sampled_from(binary)), pair, SHAPE, dtype)
        values.append(made)
    return b.finish(values[-2:])


def bits(array: np.ndarray) -> np.ndarray:
    """The bits, and one number for every NaN."""
    plain = np.ascontiguousarray(array)
    if plain.dtype.kind in "iub" and plain.dtype.name != "bfloat16":
        return plain
    found = plain.view(f"u{plain.dtype.itemsize}").copy()
    found[np.isnan(plain.astype(np.float64))] = np.iinfo(found.dtype).max
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8", "int64", "uint8"])
def test_simplified_graphs_give_the_same_bits(dtype: str) -> None:
    """``x + 0`` was ``x``, and -0.0 was the constant 0.0."""

    @settings(max_examples=120, deadline=None, derandomize=True)
    @given(expressions(dtype))
    def holds(graph: Graph) -> None:
        inputs = leaves(dtype)
        small = simplify(graph)
        for mine, theirs in zip(evaluate(small, inputs), evaluate(graph, inputs), strict=True):
            np.testing.assert_array_equal(bits(mine), bits(theirs), err_msg=f"{graph}\n{small}")

    holds()


@pytest.mark.parametrize("value", [0.0, -0.0, math.inf, -math.inf, math.nan])
def test_constants_survive_json(value: float) -> None:
    b = GraphBuilder()
    graph = b.finish([b.broadcast(b.const(value, "float32"), (2,)), b.const(0.0, "float32")])
    again = Graph.from_json(graph.to_json())
    assert again == graph
    (wide, zero) = evaluate(again, [])
    np.testing.assert_array_equal(bits(wide), bits(np.full(2, value, np.float32)))
    assert not np.signbit(zero)


@pytest.mark.parametrize("shape", [(1,), (3, 1, 2)])
def test_positions_along_one_element_are_zero(shape: tuple[int, ...]) -> None:
    b = GraphBuilder()
    place = b.append("iota", (), shape, "int64", dim=len(shape) // 2)
    twice = b.pointwise("add", b.pointwise("mul", place, place), b.input(0, shape, "int64"))
    small = simplify(b.finish([twice]))
    assert all(n.op != "iota" for n in small.nodes)
    value = np.arange(math.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(*evaluate(small, [value]), value)
