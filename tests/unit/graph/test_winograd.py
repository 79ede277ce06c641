"""Minimal filtering: exact in exact arithmetic, every result made once, refused where it is not."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from tests.emitting import signature
from torch_pruner.families.winograd.form import (
    MAX_DEPTH,
    WinogradDecisions,
    additions,
    places,
    transformed,
    winograd_of,
)
from torch_pruner.families.winograd.matrices import (
    POINTS,
    Exact,
    input_factors,
    output_factors,
    transforms,
    weight_matrix,
)
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.packing import PackLayout, to_gkn
from torch_pruner.graph.precision import allow_fast

_DECISIONS = dict.fromkeys(WinogradDecisions._fields, 1)


def conv(
    kernel: tuple[int, ...] = (3, 3),
    *,
    size: tuple[int, ...] = (9, 12),
    channels: int = 4,
    columns: int = 8,
    dilation: int = 1,
    stride: int = 1,
    groups: int = 1,
    dtype: str = "float32",
    static: bool = True,
) -> Graph:
    b = GraphBuilder()
    rank = len(kernel)
    x = b.input(0, (2, channels, *size), dtype)
    w = b.input(1, (columns, channels // groups, *kernel), dtype, static=static)
    pad = tuple(dilation * (k - 1) // 2 for k in kernel)
    out = tuple(-(-n // stride) for n in size)
    y = b.append(
        "conv", (x, w), (2, columns, *out), dtype, stride=(stride,) * rank, lo=pad, hi=pad,
        dilation=(dilation,) * rank, groups=groups,
    )  # fmt: skip
    return b.finish([y])


def along(matrix: tuple[tuple[float, ...], ...], value: np.ndarray, d: int) -> np.ndarray:
    return np.moveaxis(np.tensordot(np.array(matrix), value, (1, d)), 0, d)


@pytest.mark.parametrize(
    "kernel", [(3,), (3, 3), (1, 3), (3, 1), (2,), (2, 2), (2, 3), (3, 3, 3), (2, 1, 3)]
)
def test_a_tile_is_the_convolution(kernel: tuple[int, ...]) -> None:
    size = (9, 12, 6)[: len(kernel)]
    plan = winograd_of(conv(kernel, size=size))
    assert plan is not None
    rng = np.random.default_rng(0)
    # Small integers: the transforms halve thrice at most, so that every step is exact.
    data = rng.integers(-8, 8, plan.tile).astype(np.float64)
    taps = rng.integers(-8, 8, (1, 1, *kernel)).astype(np.float64)
    moved = data
    for d, factors in enumerate(plan.input_transform()):
        for matrix in factors:
            moved = along(matrix, moved, d)
    products = moved * transformed(taps).reshape(plan.tile)
    for d, factors in enumerate(plan.output_transform()):
        for matrix in factors:
            products = along(matrix, products, d)
    for at in places(plan.step):
        window = tuple(slice(i, i + k) for i, k in zip(at, kernel, strict=True))
        assert products[at] == (data[window] * taps[0, 0]).sum()


@pytest.mark.parametrize("points", [POINTS, (Fraction(1), Fraction(2)), (Fraction(1, 3), 3)])
def test_four_results_are_exact_in_rational_arithmetic(points: tuple[Fraction, Fraction]) -> None:
    rng = np.random.default_rng(0)
    data = [Fraction(int(n), 7) for n in rng.integers(-99, 99, 6)]
    taps = [Fraction(int(n), 3) for n in rng.integers(-99, 99, 3)]
    moved = data
    for matrix in input_factors(*points):
        moved = times(matrix, moved)
    products = [a * b for a, b in zip(moved, times(weight_matrix(*points), taps), strict=True)]
    for matrix in output_factors(*points):
        products = times(matrix, products)
    assert products == [sum(data[i + j] * taps[j] for j in range(3)) for i in range(4)]


def times(matrix: Exact, vector: list[Fraction]) -> list[Fraction]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def test_transforms_of_four_results_are_numbers_of_float32() -> None:
    """Of inputs and results; weights are transformed in double precision."""
    found = transforms(6)
    for matrix in (*found.input, *found.output):
        wide = np.array(matrix)
        assert (wide.astype(np.float32) == wide).all()


@pytest.mark.parametrize("kernel", [(3,), (3, 3), (1, 3), (3, 1)])
def test_a_tile_of_four_results_is_the_convolution(kernel: tuple[int, ...]) -> None:
    plan = winograd_of(allow_fast(conv(kernel, size=(9, 12)[: len(kernel)])), 4)
    assert plan is not None
    assert plan.step == tuple(4 if k > 1 else 1 for k in kernel)
    rng = np.random.default_rng(0)
    moved = data = rng.standard_normal(plan.tile)
    taps = rng.standard_normal((1, 1, *kernel))
    for d, factors in enumerate(plan.input_transform()):
        for matrix in factors:
            moved = along(matrix, moved, d)
    products = moved * transformed(taps, results=4).reshape(plan.tile)
    for d, factors in enumerate(plan.output_transform()):
        for matrix in factors:
            products = along(matrix, products, d)
    for at in places(plan.step):
        window = tuple(slice(i, i + k) for i, k in zip(at, kernel, strict=True))
        assert products[at] == pytest.approx((data[window] * taps[0, 0]).sum(), abs=1e-12)


def test_four_results_are_for_convolutions_that_may_be_less_exact() -> None:
    spec = conv()
    assert winograd_of(spec, 4) is None
    assert winograd_of(allow_fast(spec), 4) is not None
    with pytest.raises(ValueError, match="three neighbouring taps"):
        signature(spec, "winograd4", {**_DECISIONS, "vl": 4})
    two, marked = winograd_of(spec), winograd_of(allow_fast(spec))
    assert two == marked


@pytest.mark.parametrize("results", [2, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("size", [(9, 12), (1, 7), (16, 31)])
def test_tiles_make_every_result_once(size: tuple[int, int], dilation: int, results: int) -> None:
    plan = winograd_of(allow_fast(conv(size=size, dilation=dilation)), results)
    assert plan is not None
    assert plan.tiles == np.prod(plan.grid)
    made = np.zeros(size, dtype=int)
    for tile in itertools.product(*map(range, plan.grid[1:])):
        begin = [plan.first(d, t) for d, t in enumerate(tile)]
        for place in places(plan.step):
            at = tuple(b + i * g for b, i, g in zip(begin, place, plan.dilation, strict=True))
            if all(i < n for i, n in zip(at, size, strict=True)):
                made[at] += 1
    assert (made == 1).all()
    assert [plan.first(d, n - 1) for d, n in enumerate(plan.grid[1:])] == [
        plan.last(0),
        plan.last(1),
    ]


@pytest.mark.parametrize(
    "spec",
    [
        conv((5, 5), static=False),
        conv((13, 1), size=(20, 4)),
        conv((1, 1)),
        conv((3, 1), stride=2),
        conv((4, 4), stride=2, static=False),
        conv((4, 4), stride=2, channels=MAX_DEPTH // 2),
        conv(dtype="bfloat16"),
        conv(dtype="float64"),
        conv(channels=MAX_DEPTH + 16),
        conv((3, 3), channels=MAX_DEPTH // 2, stride=2),
    ],
)
def test_others_are_refused(spec: Graph) -> None:
    assert winograd_of(spec) is None
    with pytest.raises(ValueError, match="three neighbouring taps"):
        signature(spec, "winograd", {**_DECISIONS, "vl": 4})


def test_weights_are_transformed_in_double_precision_and_rounded_once() -> None:
    taps = np.array([1.0, 2.0**-24, 1.0], np.float32).reshape(1, 1, 3)
    assert transformed(taps).dtype == np.float32
    assert transformed(taps).ravel().tolist() == [1.0, 1.0, 1.0, 1.0]
    exact = transformed(taps.astype(np.float64)).ravel()
    assert exact.tolist() == [1.0, 1.0 + 2.0**-25, 1.0 - 2.0**-25, 1.0]


def test_weights_are_packed_panel_by_panel() -> None:
    spec = conv(channels=4, columns=8)
    decisions = {**_DECISIONS, "vl": 2, "nv": 2, "tm": 3, "tb": 2, "mc": 2, "nc": 2}
    takes = signature(spec, "winograd", decisions)
    layout = takes.packs[1]
    assert isinstance(layout, PackLayout)
    assert layout.shape == (1, 2, 16 * 4, 4)
    assert PackLayout.from_json(layout.to_json()) == layout
    weights = np.random.default_rng(0).standard_normal((8, 4, 3, 3)).astype(np.float32)
    whole = to_gkn(weights, "winograd", 1)
    packed = layout.pack(weights)
    for block, k, v in itertools.product(range(2), range(64), range(4)):
        assert packed[0, block, k, v] == whole[0, k, block * 4 + v]
    # Five tiles by six, two images: ten blocks of six tiles, in two chunks; two shares.
    tasks, positions, rows = 4, 16, 6
    assert [s.shape for s in takes.scratch] == [
        (tasks, positions, rows, 4),
        (tasks, positions, rows, 4),
    ]


def test_a_stride_that_divides_the_kernel_makes_channels_of_positions() -> None:
    plan = winograd_of(conv((4, 6), stride=2, size=(8, 12)))
    assert plan is not None
    assert (plan.taps, plan.split, plan.tile) == ((2, 3), (2, 2), (3, 4))
    assert (plan.channels, plan.reach) == (16, (1, 1))
    assert plan.filled == 1
    assert winograd_of(allow_fast(conv((4, 4), stride=2, size=(8, 8))), 4) is None


def test_where_a_stride_does_not_divide_the_kernel_products_are_left_out() -> None:
    plan = winograd_of(conv((3, 3), stride=2, size=(8, 8)))
    assert plan is not None
    assert (plan.taps, plan.split, plan.tile, plan.whole) == ((2, 2), (2, 2), (3, 3), (1, 1))
    assert plan.positions * plan.filled * 4 == pytest.approx(25)
    assert plan.con.flops == pytest.approx(36 / 25 * plan.flops)


@pytest.mark.parametrize(
    ("taps", "each", "pieces", "products"),
    [(4, 2, 2, 6), (5, 3, 2, 7), (7, 3, 3, 11), (9, 3, 3, 12)],
)
def test_long_kernels_are_sums_of_short_ones(
    taps: int, each: int, pieces: int, products: int
) -> None:
    plan = winograd_of(conv((1, taps), size=(4, 20)))
    assert plan is not None
    assert (plan.taps, plan.pieces, plan.parts) == ((1, each), (1, pieces), (1, pieces))
    assert plan.positions * plan.filled * pieces == pytest.approx(products)


def test_groups_have_weights_of_their_own() -> None:
    weights = np.random.default_rng(0).standard_normal((6, 2, 3, 3)).astype(np.float32)
    both = transformed(weights, 2)
    assert both.shape == (2, 16 * 2, 3)
    for g in range(2):
        assert (both[g] == transformed(weights[3 * g : 3 * g + 3])[0]).all()


def test_costs_are_those_of_the_literature() -> None:
    plan = winograd_of(conv(size=(8, 8)))
    assert plan is not None
    assert additions(plan.input_transform()) == 32
    assert additions(plan.output_transform()) == 24
    assert plan.con.flops == pytest.approx(2.25 * plan.flops)
    four = winograd_of(allow_fast(conv(size=(8, 8))), 4)
    assert four is not None
    assert additions(four.input_transform()) == 144
    assert additions(four.output_transform()) == 100
    assert four.con.flops == pytest.approx(4 * four.flops)
