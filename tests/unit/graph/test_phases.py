"""A strided transposed convolution as dense convolutions per phase: the arithmetic, in numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate


def transposed(size: int, kernel: int, stride: int, pad: int, more: int) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (1, 3, size, size), "float32")
    w = b.input(1, (3, 5, kernel, kernel), "float32", static=True)
    extent = (size - 1) * stride - 2 * pad + kernel + more
    y = b.append(
        "conv_transpose", (x, w), (1, 5, extent, extent), "float32", stride=(stride,) * 2,
        lo=(pad,) * 2, dilation=(1, 1), groups=1,
    )  # fmt: skip
    return b.finish([y])


def by_phase(spec: Graph, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What the emitter computes, from the canonical form and the packed operand alone."""
    con = contraction_of(spec)
    conv, stride = con.conv, con.batch
    assert conv is not None
    found = constant_operand(spec, con)
    assert found is not None
    weights = evaluate(found[1], [w])[0]
    size = x.shape[2]
    padded = np.zeros((3, *conv.padded), np.float32)
    for at in itertools.product(*(range(p) for p in conv.padded)):
        source = [a - lo for a, lo in zip(at, conv.lo, strict=True)]
        if all(0 <= s < size for s in source):
            padded[(slice(None), *at)] = x[(0, slice(None), *source)]
    out = np.zeros(spec.nodes[con.anchor].shape, np.float32)
    for g, counted in enumerate(itertools.product(*(range(s) for s in stride))):
        late = [(h + p) // s for h, p, s in zip(counted, conv.phase, stride, strict=True)]
        first = [
            (2 * s - 1 - p - h) % s for h, p, s in zip(counted, conv.phase, stride, strict=True)
        ]
        for q in itertools.product(*(range(m) for m in con.m[1:])):
            window = tuple(
                slice(a + e, a + e + t) for a, e, t in zip(q, late, conv.kernel, strict=True)
            )
            taps = padded[(slice(None), *window)].transpose(1, 2, 0).reshape(-1)
            place = [a * s + f for a, s, f in zip(q, stride, first, strict=True)]
            out[(0, slice(None), *place)] = taps @ weights[g]
    return out


@pytest.mark.parametrize(
    "geometry",
    [(4, 4, 2, 1, 0), (5, 3, 2, 1, 1), (5, 1, 2, 0, 1), (4, 6, 3, 2, 1), (4, 4, 2, 3, 0)],
)
def test_phases_are_the_transposed_convolution(geometry: tuple[int, ...]) -> None:
    spec = transposed(*geometry)
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(spec.nodes[i].shape).astype("float32") for i in spec.inputs)
    np.testing.assert_allclose(by_phase(spec, x, w), evaluate(spec, [x, w])[0], atol=1e-5)


def test_no_multiplication_by_inserted_zeros() -> None:
    con = contraction_of(transposed(4, 4, 2, 1, 0))
    assert con.flops == 2 * (8 * 8) * 5 * (3 * 2 * 2)


def test_only_where_positions_divide_evenly() -> None:
    assert contraction_of(transposed(5, 3, 2, 1, 0)).form == "conv_transpose"
    assert contraction_of(transposed(5, 3, 1, 1, 0)).form == "conv_transpose"
