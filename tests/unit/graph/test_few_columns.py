"""Convolutions to few channels are a product and a sum where asked, and give what they gave."""

from __future__ import annotations

import numpy as np
import pytest

from torch_pruner.graph.few_columns import MOST_COLUMNS, spread_columns
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.reference import evaluate


def conv(x, out, taps, *, lo=None, hi=None, dilation=None, stride=None, groups=1, dtype="float32"):
    rank = len(taps)
    ones, zeros = (1,) * rank, (0,) * rank
    lo, hi, dilation, stride = lo or zeros, hi or zeros, dilation or ones, stride or ones
    dims = zip(x[2:], taps, lo, hi, dilation, stride, strict=True)
    extents = [(n + p + q - (r - 1) * d - 1) // s + 1 for n, r, p, q, d, s in dims]
    b = GraphBuilder()
    nodes = b.input(0, x, dtype), b.input(1, (out, x[1] // groups, *taps), dtype, static=True)
    made = b.append(
        "conv", nodes, (x[0], out, *extents), dtype, stride=stride, lo=lo, hi=hi,
        dilation=dilation, groups=groups,
    )  # fmt: skip
    return b.finish([b.pointwise("relu", made)])


def transposed(x, out, taps, stride, *, lo=None, more=None, dilation=None):
    rank = len(taps)
    lo, more = lo or (0,) * rank, more or (0,) * rank
    dims = zip(x[2:], taps, stride, lo, more, strict=True)
    extents = [(n - 1) * s - 2 * p + r + m for n, r, s, p, m in dims]
    b = GraphBuilder()
    nodes = b.input(0, x, "float32"), b.input(1, (x[1], out, *taps), "float32", static=True)
    made = b.append(
        "conv_transpose", nodes, (x[0], out, *extents), "float32", stride=stride, lo=lo,
        dilation=dilation or (1,) * rank, groups=1,
    )  # fmt: skip
    return b.finish([made])


SPREAD = {
    "3x3": conv((2, 8, 6, 7), 3, (3, 3), lo=(1, 1), hi=(1, 1)),
    "no padding": conv((1, 9, 6, 7), 1, (2, 3)),
    "uneven padding, dilated": conv((1, 8, 9, 9), 2, (3, 2), lo=(0, 3), hi=(2, 1), dilation=(2, 3)),
    "1d": conv((2, 16, 11), 4, (5,), lo=(2,), hi=(2,)),
    "3d": conv((1, 8, 4, 5, 3), 2, (2, 3, 2), lo=(1, 1, 0), hi=(0, 1, 1)),
    "transposed": transposed((2, 8, 4, 5), 3, (4, 4), (2, 2), lo=(1, 1)),
    "transposed, as one stride": transposed((1, 8, 5), 1, (3,), (3,)),
    "transposed, stride one": transposed((1, 8, 5, 4), 2, (3, 2), (1, 1), lo=(1, 0)),
    "transposed, three shifts": transposed((1, 8, 3, 4), 2, (6, 2), (2, 2), lo=(2, 0)),
    "transposed, more": transposed((1, 8, 3, 4), 2, (4, 4), (2, 2), lo=(1, 1), more=(1, 0)),
    "transposed, 3d": transposed((1, 8, 3, 2, 2), 2, (2, 4, 2), (2, 2, 1), lo=(0, 1, 0)),
}
LEFT = {
    "many columns": conv((1, 8, 6, 6), MOST_COLUMNS + 1, (3, 3)),
    "few channels": conv((1, 3, 6, 6), 3, (3, 3)),
    "one tap": conv((1, 8, 6, 6), 3, (1, 1)),
    "strided": conv((1, 8, 6, 6), 3, (3, 3), stride=(2, 2)),
    "groups": conv((1, 16, 6, 6), 4, (3, 3), groups=2),
    "cropped": conv((1, 8, 6, 6), 3, (3, 3), lo=(-1, 0)),
    "bfloat16": conv((1, 8, 6, 6), 3, (3, 3), dtype="bfloat16"),
    "transposed, uneven": transposed((1, 8, 4, 4), 3, (3, 3), (2, 2)),
    "transposed, dilated": transposed((1, 8, 4, 4), 3, (2, 2), (1, 1), dilation=(2, 1)),
    "transposed, beyond": transposed((1, 8, 4, 4), 3, (2, 2), (2, 2), more=(1, 0)),
}


@pytest.mark.parametrize("graph", SPREAD.values(), ids=SPREAD)
def test_the_result_is_what_it_was(graph) -> None:
    spread = spread_columns(graph, lambda _direct, _spread: True)
    assert spread != graph
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(graph.nodes[i].shape).astype(np.float32) for i in graph.inputs]
    (before,), (after,) = evaluate(graph, given), evaluate(spread, given)
    assert after.shape == before.shape
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("graph", LEFT.values(), ids=LEFT)
def test_what_gains_nothing_or_cannot_be_is_left_alone(graph) -> None:
    assert spread_columns(graph, lambda _direct, _spread: True) is graph


def test_who_knows_the_machine_decides_on_graphs_of_the_convolution_alone() -> None:
    graph, asked = SPREAD["3x3"], []

    def takes(direct, spread) -> bool:
        asked.append((direct, spread))
        return False

    assert spread_columns(graph, takes) is graph
    ((direct, spread),) = asked
    assert [n.op for n in direct.nodes] == ["input", "input", "permute", "conv", "permute"]
    assert spread.nodes[spread.outputs[0]].shape == direct.nodes[direct.outputs[0]].shape
    assert direct.nodes[1].attr("static")
