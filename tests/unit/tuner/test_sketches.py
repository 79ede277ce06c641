"""Sketches: the contract for each kind of kernel, and what each space leaves out."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.contracts.sketch import SketchContract
from tests.unit.graph.random_graphs import graphs
from tests.unit.tuner.graphs_by_kind import (
    byte_product,
    convolution,
    crossed,
    depthwise_gradient,
    depthwise_transposed,
    few_rows,
    int4,
    keys,
    matmul,
    pointwise,
    pooling,
    reduction,
    softmax,
    turned,
    weight_gradient,
)
from torch_pruner.families import machine, named, sketches_for
from torch_pruner.families.bf16_pairs.space import Bf16PairsSketch
from torch_pruner.families.bf16_tiles import space as tiles
from torch_pruner.families.bf16_tiles.space import Bf16TilesSketch
from torch_pruner.families.gradient.form import gradient_of
from torch_pruner.families.machine import read_bytes
from torch_pruner.families.space import _pairs
from torch_pruner.graph.extents import Bound, bounded
from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.precision import allow_fast
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from torch_pruner.families.space import Sketch

_TARGETS = {
    "512": TargetSpec.from_dict({"kind": "llvm", "mcpu": "icelake-server"}, 4),
    "256": TargetSpec.from_dict({"kind": "llvm", "mcpu": "haswell"}, 4),
    "two halves": TargetSpec.from_dict({"kind": "llvm", "mcpu": "znver4"}, 4),
}


_SPECS = {
    "linear": matmul(128, 96, 256),
    "one row": matmul(1, 96, 256),
    "one row along": few_rows(1, 96, 256),
    "few rows along": few_rows(5, 70, 33, "bfloat16"),
    "many rows along": few_rows(17, 96, 256),
    "one short column": few_rows(2, 3, 1),
    "keys": keys(),
    "ragged": matmul(37, 41, 50),
    "one element": matmul(1, 1, 1),
    "run-time operand": matmul(64, 64, 64, static=False),
    "bfloat16": matmul(64, 64, 64, dtype="bfloat16"),
    "float64": matmul(64, 64, 64, dtype="float64"),
    "conv": convolution(),
    "fast conv": allow_fast(convolution()),
    "five taps": convolution(kernel=5),
    "grouped": convolution(4),
    "depthwise": convolution(16),
    "depthwise gradient": depthwise_gradient(24, (14, 14), 3),
    "transposed depthwise": depthwise_transposed(24, (14, 14), 3, 2, 1, more=1),
    "transposed": convolution(op="conv_transpose"),
    "turned": turned(),
    "weight gradient": weight_gradient(),
    "softmax": softmax(),
    "softmax of outer axis": softmax(axis=0),
    "softmax of one": softmax((1, 1, 1)),
    "outer sum": reduction(),
    "inner sum": reduction((2,)),
    "full sum": reduction((0, 1, 2)),
    "bool any": reduction((1,), "any", "bool"),
    "argmax": reduction((1,), "argmax"),
    "pooling": pooling(),
    "pointwise": pointwise(),
    "lying across": crossed((40, 7, 33), (2, 0, 1)),
    "scalar": pointwise(()),
    "int8": reduction((0,), "max", "int8"),
    "int4": int4(1),
    "few rows of int4": int4(5, offsets=True),
    "many rows of int4": int4(70),
    "bytes": byte_product(),
    "many rows of bytes": byte_product(70, first="uint8"),
}
_SPACES = [
    (name, target, threads, sketch.name)
    for name, spec in _SPECS.items()
    for target, threads in (("512", 4), ("256", 1))
    for sketch in sketches_for(Task(name, spec, _TARGETS[target], threads))
]


def made(name: str, target: str, threads: int, sketch: str) -> Sketch:
    found = sketches_for(Task(name, _SPECS[name], _TARGETS[target], threads))
    return next(s for s in found if s.name == sketch)


class TestSketches(SketchContract):
    @pytest.fixture(params=_SPACES, ids=lambda p: "-".join(map(str, p)).replace(" ", "_"))
    def sketch(self, request) -> Sketch:
        return made(*request.param)


# Names in order: trained weights and stored caches hold decisions by them.
_NAMES = {
    "attention": "vl nv tm tr nc kb order pack turned tasks pairs",
    "axpy": "vl ku cv ahead par",
    "bf16_pairs": "tm nv mc order ku tasks ahead way",
    "bf16_tiles": "rt nv mc order ku tasks ahead way",
    "columns": "vl chunk par",
    "contraction": "vl tm nv mc order ku pack par ahead kb",
    "depthwise": "vl tw th nv mc order par",
    "depthwise_gradient": "vl nv tc lb mc par",
    "elementwise": "vl chunk par",
    "filtered_gradient": "vl tm nv tb cs ns ku par",
    "gradient": "vl tm nv mc lb par",
    "in_place": "vl nv nc nb ahead par",
    "int4_panels": "vl tm nv mc order ku pack par ahead kb",
    "int4_rows": "vl nv split early table ahead par",
    "int8_products": "vl word tm nv mc par",
    "lane_per_row": "vl nv par",
    "outer_products": "vl tm nv mc order ku par kb",
    "planar": "vl tm nv ln rp mc par cp bl",
    "rows": "vl lanes chunk par apart",
    "transposed": "vl tile chunk par",
    "winograd": "vl tm nv tb mc nc ku ahead par",
    "winograd4": "vl tm nv tb mc nc ku ahead par",
}


@pytest.mark.parametrize("name", _NAMES)
def test_decisions_keep_their_names_and_order(name: str) -> None:
    family, names = named(name), tuple(_NAMES[name].split())
    assert family.decisions._fields == family.space().names == names


@pytest.mark.parametrize("name", _NAMES)
def test_decisions_of_other_names_are_refused(name: str) -> None:
    family = named(name)
    right = {n: k for k, n in enumerate(_NAMES[name].split())}
    assert family.typed(right) == tuple(range(len(right)))
    first = next(iter(right))
    for wrong in ({**right, "unknown": 1}, {n: v for n, v in right.items() if n != first}):
        with pytest.raises(ValueError, match=f"decisions of {name}"):
            family.typed(wrong)


def test_columns_hold_the_decisions_of_all_points() -> None:
    sketch = made("linear", "512", 4, "contraction")
    points = _grid(sketch)[:50]
    columns = sketch.columns(points)
    np.testing.assert_array_equal(columns.tm, points[:, 1])
    np.testing.assert_array_equal(np.stack(columns, axis=1), points)
    assert all(column.dtype == np.float64 for column in columns)


def _grid(sketch: Sketch) -> np.ndarray:
    grid = np.stack(np.meshgrid(*sketch.domains, indexing="ij"), axis=-1)
    return grid.reshape(-1, len(sketch.names))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", ["contraction"]),
        ("one row", ["axpy", "contraction"]),
        ("one row along", ["in_place", "contraction"]),
        ("few rows along", ["in_place", "contraction"]),
        ("many rows along", ["contraction"]),
        ("int4", ["int4_rows", "int4_panels"]),
        ("many rows of int4", ["int4_panels"]),
        ("bytes", ["int8_products", "contraction"]),
        ("keys", ["in_place", "contraction"]),
        ("conv", ["planar", "winograd", "contraction"]),
        ("fast conv", ["planar", "winograd", "winograd4", "contraction"]),
        ("five taps", ["planar", "winograd", "contraction"]),
        ("turned", ["outer_products", "contraction"]),
        ("weight gradient", ["filtered_gradient", "gradient", "contraction"]),
        ("depthwise", ["depthwise", "planar"]),
        ("depthwise gradient", ["depthwise_gradient"]),
        ("transposed depthwise", ["depthwise"]),
        ("softmax", ["rows"]),
        ("outer sum", ["columns", "lane_per_row", "rows"]),
        ("argmax", ["columns", "rows"]),
        ("pooling", ["columns"]),
        ("pointwise", ["elementwise"]),
        ("lying across", ["transposed", "elementwise"]),
    ],
)
def test_which_sketches_express_a_kernel(name: str, expected: list[str]) -> None:
    found = sketches_for(Task(name, _SPECS[name], _TARGETS["512"], 4))
    assert [s.name for s in found] == expected


@pytest.mark.parametrize("name", ["winograd", "contraction"])
def test_fast_math_leaves_the_spaces_of_others_alone(name: str) -> None:
    ours, marked = made("conv", "512", 4, name), made("fast conv", "512", 4, name)
    for left, right in zip(ours.domains, marked.domains, strict=True):
        np.testing.assert_array_equal(left, right)
    points = _spread_points(ours)
    np.testing.assert_array_equal(ours.valid(points), marked.valid(points))
    np.testing.assert_array_equal(ours.symbols(points).latency_s, marked.symbols(points).latency_s)


def test_estimates_of_larger_tiles_count_transforms_and_memory() -> None:
    """Fewer products, but more weights: which of the two is drafted is left to the estimates."""
    two, four = (made("fast conv", "512", 4, name) for name in ("winograd", "winograd4"))
    points = _spread_points(two)
    points = points[two.valid(points) & four.valid(points)]
    fewer, more = four.symbols(points), two.symbols(points)
    assert fewer.s8_ops.min() < more.s8_ops.min()
    assert (fewer.s5_traffic_bytes > more.s5_traffic_bytes).all()


def _spread_points(sketch: Sketch) -> np.ndarray:
    grid = _grid(sketch)
    return grid[:: max(1, len(grid) // 500)]


_HALVES = {
    "even": matmul(128, 96, 256, dtype="bfloat16"),
    "one row": matmul(1, 96, 256, dtype="bfloat16"),
    "ragged": matmul(37, 41, 50, dtype="bfloat16"),
    "run-time operand": matmul(64, 64, 64, static=False, dtype="bfloat16"),
    "one element": matmul(1, 1, 1, dtype="bfloat16"),
}
_WIDE = dataclasses.replace(
    TargetSpec.from_dict({"kind": "llvm", "mcpu": "sapphirerapids"}, 4), bf16_tiles=True
)


class TestPairs(SketchContract):
    """The sketches of bfloat16 pairs, whatever this machine has."""

    @pytest.fixture(params=[(n, t) for n in _HALVES for t in (1, 4)], ids=str)
    def task(self, request) -> Task:
        name, threads = request.param
        return Task(name, _HALVES[name], _WIDE, threads)

    @pytest.fixture(params=[Bf16PairsSketch, Bf16TilesSketch])
    def sketch(self, task, request) -> Sketch:
        return request.param(task)


def test_pairs_need_the_instructions(monkeypatch) -> None:
    def names(target: TargetSpec, spec: Graph) -> list[str]:
        return [s.name for s in sketches_for(Task("kernel", spec, target, 4))]

    even = _HALVES["even"]
    for allowed, expected in ((True, ["bf16_tiles"]), (False, [])):
        monkeypatch.setattr(tiles, "tiles_allowed", lambda allowed=allowed: allowed)
        assert names(_WIDE, even) == [*expected, "bf16_pairs", "contraction"]
    zen = TargetSpec.from_dict({"kind": "llvm", "mcpu": "znver4"}, 4)
    assert names(zen, even) == ["bf16_pairs", "contraction"]
    assert names(_TARGETS["512"], even) == ["contraction"]
    assert names(_WIDE, _SPECS["linear"]) == ["contraction"]


def test_gradients_take_whole_vectors_of_columns() -> None:
    task = Task("kernel", weight_gradient(out=24), _TARGETS["512"], 4)
    assert [s.name for s in sketches_for(task)] == ["contraction"]


def test_gradients_along_a_long_line_are_summed_in_parts() -> None:
    """Thousands of products in one go lose digits: a block has pieces of a line."""
    b = GraphBuilder()
    x = b.permute(b.input(0, (2, 4096, 16), "float32"), (2, 0, 1))
    grad = b.permute(b.input(1, (2, 4096, 32), "float32"), (2, 0, 1))
    y = b.append(
        "conv", (x, grad), (16, 32, 5), "float32", stride=(1,), lo=(2,), hi=(2,), dilation=(1,),
        groups=1,
    )  # fmt: skip
    task = Task("kernel", b.finish([y]), _TARGETS["512"], 4)
    sketch, general = sketches_for(task)
    assert (sketch.name, general.name) == ("gradient", "contraction")
    of = gradient_of(task.spec)
    assert of is not None
    blocks = sketch.domains[sketch.names.index("lb")]
    assert (of.piece, of.pieces, of.lines) == (1024, 4, 8)
    assert (blocks * of.piece).max() <= 1024


def test_statistics_of_channels_are_drafted_abreast() -> None:
    """Rows gathered across memory took ten times as long as predicted, lanes abreast a tenth."""
    b = GraphBuilder()
    x = b.permute(b.input(0, (4, 112, 112, 64), "float32"), (0, 3, 1, 2))
    total = b.reduce("sum", b.pointwise("mul", x, x), (0, 2, 3))
    spec = b.finish([b.pointwise("rsqrt", total)])
    found = {s.name: s for s in sketches_for(Task("kernel", spec, _TARGETS["512"], 2))}
    seconds = {n: float(s.symbols(s.default()[None]).latency_s[0]) for n, s in found.items()}
    assert seconds["rows"] > 5 * seconds["lane_per_row"]


def test_one_thread_has_no_parallel_tasks() -> None:
    for kind in (Bf16PairsSketch, Bf16TilesSketch):
        points = _grid(sketch := kind(Task("kernel", _HALVES["even"], _WIDE, 1)))
        points = points[sketch.valid(points)]
        assert (points[:, sketch.names.index("tasks")] == 1).all()


def test_register_tiles_fit_the_registers() -> None:
    for target in ("512", "256"):
        sketch = made("linear", target, 4, "contraction")
        points = _grid(sketch)
        points = points[sketch.valid(points)]
        used = points[:, 1] * points[:, 2] + points[:, 2] + 1
        assert used.max() <= _TARGETS[target].vector_registers


def test_one_thread_has_no_parallel_points() -> None:
    for name in _SPECS:
        for sketch in sketches_for(Task(name, _SPECS[name], _TARGETS["512"], 1)):
            assert sketch.domains[sketch.names.index("par")].tolist() == [0]


def test_a_constant_operand_is_always_packed() -> None:
    constant = made("linear", "512", 4, "contraction")
    other = made("run-time operand", "512", 4, "contraction")
    at = constant.names.index("pack")
    assert constant.domains[at].tolist() == [1]
    assert other.domains[at].tolist() == [0, 1, 2]


def test_more_work_is_predicted_to_take_longer() -> None:
    seconds = []
    for depth in (64, 512):
        (sketch,) = sketches_for(Task("m", matmul(256, depth, 256), _TARGETS["512"], 1))
        seconds.append(sketch.symbols(sketch.default()[None]).latency_s[0])
    assert seconds[1] > 2 * seconds[0]


def test_of_a_table_the_rows_that_are_picked_count() -> None:
    """An embedding of one token reads a row, and is not shared out between threads for the rest."""
    b = GraphBuilder()
    table, at = b.input(0, (30_000, 256), "float32"), b.input(1, (1,), "int64")
    row = b.append("take", (table, at), (1, 256), "float32", dim=0)
    picked = b.finish([b.pointwise("exp", row)])
    assert read_bytes(picked) == 256 * 4 + 8
    (sketch,) = sketches_for(Task("t", picked, _TARGETS["512"], 2))
    assert sketch.named(sketch.default())["par"] == 0
    whole = b.finish([b.pointwise("mul", row, b.reduce("sum", table, [0]))])
    assert read_bytes(whole) == 30_000 * 256 * 4 + 8


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(graphs())
def test_symbols_of_any_kernel(graph: Graph) -> None:
    for kernel in fuse(graph).kernels:
        for sketch in sketches_for(Task("kernel", kernel.spec, _TARGETS["512"], 4)):
            points = _grid(sketch)
            points = points[sketch.valid(points)]
            latency = sketch.symbols(points).latency_s
            assert np.isfinite(latency).all()
            assert (latency > 0).all()


@pytest.mark.parametrize(
    ("target", "columns", "width"),
    [("two halves", 24, 8), ("two halves", 32, 16), ("512", 24, 16), ("256", 12, 8)],
)
def test_half_vectors_where_columns_fill_them_better_and_none_is_lost(
    target: str, columns: int, width: int
) -> None:
    """24 channels in vectors of 16 waste a quarter, where halves multiply twice as often."""
    (sketch,) = sketches_for(Task("t", matmul(3136, 96, columns), _TARGETS[target], 1))
    draft = dict(sketch.named(sketch.default()))
    assert draft["vl"] == width
    assert draft["nv"] * draft["vl"] <= columns + width - 1


def test_rows_that_are_counted_at_run_time_are_drafted_for_few_as_well() -> None:
    """Chunks for the longest text pass all weights by for four rows of a short one."""

    def drafted(rows: int, *, counted: bool) -> int:
        b, x = GraphBuilder(), 0
        for node in matmul(rows, 512, 2048).nodes:
            x = b.again(node, list(node.inputs))
        if counted:
            x = bounded(b, x, [Bound(2048, rows, b.input(2, (), "int32", counts=True))])
        zen3 = TargetSpec.from_dict({"kind": "llvm", "mcpu": "znver3"}, 2)
        zen3 = replace(zen3, l1_bytes=32 << 10, l2_bytes=512 << 10)  # not those of the machine here
        task = Task("kernel", b.finish([x]), zen3, 2)
        (sketch,) = (s for s in sketches_for(task) if s.name == "contraction")
        return sketch.named(sketch.default())["mc"]

    few, many = (drafted(rows, counted=False) for rows in (64, 512))
    assert few <= drafted(512, counted=True) < many


def test_one_row_of_bfloat16_is_read_where_it_lies() -> None:
    """One core was thought to read as fast as all of them, which made a packed copy look faster."""
    zen = TargetSpec.from_dict({"kind": "llvm", "mcpu": "znver5"}, 2)
    zen = dataclasses.replace(zen, cores=2, dram_bytes_per_s=66e9)
    found = sketches_for(Task("kernel", few_rows(1, 768, 768, "bfloat16"), zen, 2))
    seconds = {s.name: float(s.symbols(s.default()[None]).latency_s[0]) for s in found}
    assert min(seconds, key=lambda name: seconds[name]) == "in_place"


def test_floats_are_not_fetched_where_the_processor_reads_ahead() -> None:
    """Of a row of each width on a Zen 3: the family, and how far ahead it fetches."""
    zen3 = TargetSpec.from_dict({"kind": "llvm", "mcpu": "znver3"}, 2)
    caches = {"l1_bytes": 32 << 10, "l2_bytes": 512 << 10, "l3_bytes": 32 << 20}
    rates = {"frequency_hz": 3.4e9, "dram_bytes_per_s": 40e9}
    zen3 = dataclasses.replace(zen3, cores=2, **caches, **rates)
    assert zen3.reads_ahead

    def drafted(target: TargetSpec, dtype: str, rows: int = 1) -> tuple[str, int]:
        task = Task("kernel", few_rows(rows, 768, 3072, dtype), target, 2)
        found = min(sketches_for(task), key=lambda s: s.symbols(s.default()[None]).latency_s[0])
        return found.name, found.named(found.default())["ahead"]

    assert drafted(zen3, "float32") == ("in_place", 0)
    assert drafted(zen3, "bfloat16") == ("in_place", 2048)
    assert drafted(zen3, "float32", 4) == ("contraction", 0)
    assert drafted(zen3, "bfloat16", 4) == ("contraction", 1)
    asked = dataclasses.replace(zen3, reads_ahead=False)
    assert drafted(asked, "float32") == ("in_place", 8192)
    assert drafted(asked, "float32", 4) == ("contraction", 1)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_a_zen_4_is_not_asked_for_floats_either(rows: int) -> None:
    zen4 = TargetSpec.from_dict({"kind": "llvm", "mcpu": "znver4"}, 2)
    task = Task("kernel", few_rows(rows, 768, 3072, "float32"), zen4, 2)
    found = min(sketches_for(task), key=lambda s: s.symbols(s.default()[None]).latency_s[0])
    assert found.named(found.default())["ahead"] == 0


def test_tiles_of_a_short_line_leave_registers_for_it() -> None:
    """What neighbouring rows share of it was spilled by tiles of twelve sums."""
    b = GraphBuilder()
    x = b.input(0, (1, 3, 64, 64), "float32")
    w = b.input(1, (16, 3, 3, 3), "float32", static=True)
    both = {"stride": (2, 2), "lo": (1, 1), "hi": (0, 0), "dilation": (1, 1), "groups": 1}
    spec = b.finish([b.append("conv", (x, w), (1, 16, 32, 32), "float32", **both)])
    sketch = named("contraction").space()(Task("kernel", spec, _TARGETS["256"], 1))
    found = sketch.named(sketch.default())
    assert found["tm"] * found["nv"] <= 8


@pytest.mark.parametrize(
    ("stride", "count", "cycles"),
    [
        (512, 4000, 0.0),  # prefetchers follow
        (1536, 197, 0.0),  # few pages
        (1536, 400, machine.STRIDE_CYCLES),
        (2048, 512, machine.FAR_CYCLES),  # 32 sets of eight lines
        (8192, 512, machine.FAR_CYCLES),
    ],
)
def test_steps_wait_for_operands_that_lie_apart(stride: int, count: int, cycles: float) -> None:
    target = dataclasses.replace(_TARGETS["512"], l2_bytes=512 << 10)
    assert machine.stride_cycles(stride, count, target) == cycles


def test_moves_are_every_point_that_differs_in_up_to_two_decisions_once() -> None:
    domains = ((1, 2, 4), (0, 1), (3, 5, 7), (8,))
    point = np.array([2, 0, 7, 8])
    found = [tuple(p) for p in _pairs(domains).of(point).tolist()]
    near = [p for p in itertools.product(*domains) if (np.array(p) != point).sum() <= 2]
    assert len(set(found)) == len(found)
    assert set(found) == set(near)


@pytest.mark.parametrize("name", ["512", "two halves"])
def test_depthwise_tiles_that_are_unrolled_too_far_are_not_drafted(name: str) -> None:
    """The worst first choice of all records (``benchmarks.zero``): 14 columns of MobileNet-V2."""
    b = GraphBuilder()
    x = b.input(0, (1, 96, 112, 112), "float32")
    w = b.input(1, (96, 1, 3, 3), "float32", static=True)
    both = {"stride": (2, 2), "lo": (1, 1), "hi": (0, 0), "dilation": (1, 1), "groups": 96}
    spec = b.finish([b.append("conv", (x, w), (1, 96, 56, 56), "float32", **both)])
    sketch = named("depthwise").space()(Task("kernel", spec, _TARGETS[name], 2))
    found = sketch.named(sketch.default())
    assert found["tw"] * found["th"] * found["nv"] <= 8
