"""Selections beside words whose bits are chosen by a constant, which LLVM's selection gets wrong.

On processors with AVX-512; the others take the same cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.families import kernels as K
from torch_pruner.graph.ir import GraphBuilder

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

MASK = 0x7FFFFFFF


def masks(b: GraphBuilder, x: int, y: int, dtype: str) -> int:
    here = b.pointwise("bitwise_and", y, b.const(MASK, dtype))
    return b.pointwise("bitwise_or", here, b.pointwise("bitwise_and", x, b.const(~MASK, dtype)))


def differences(b: GraphBuilder, x: int, y: int, dtype: str) -> int:
    differing = b.pointwise("bitwise_and", b.pointwise("bitwise_xor", x, y), b.const(MASK, dtype))
    return b.pointwise("bitwise_xor", x, differing)


def factors(b: GraphBuilder, x: int, y: int, dtype: str) -> int:
    here = b.pointwise("bitwise_or", y, b.const(~MASK, dtype))
    return b.pointwise("bitwise_and", here, b.pointwise("bitwise_or", x, b.const(MASK, dtype)))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("beside", ["x", "y"])
@pytest.mark.parametrize("form", [masks, differences, factors])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_choice_between_chosen_bits_and_their_source(
    dtype: str, form: Callable[..., int], beside: str, first: bool
) -> None:
    b = GraphBuilder()
    x, y = b.input(0, (7, 20), dtype), b.input(1, (7, 20), dtype)
    pair = [form(b, x, y, dtype), x if beside == "x" else y]
    chosen = pair if first else pair[::-1]
    spec = b.finish([b.pointwise("where", b.input(2, (7, 20), "bool"), *chosen)])
    decisions = {"vl": 16 if dtype == "int32" else 8, "chunk": 8, "par": 0}
    outputs, expected, _ = K.run(spec, "elementwise", decisions)
    assert np.array_equal(outputs[0], expected[0])
