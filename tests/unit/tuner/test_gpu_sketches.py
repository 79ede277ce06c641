"""Spaces of GPU kernels: capacities, symbols against counting, and the release's own analyzer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.graph.attention_graphs import Case, attention
from torch_pruner import families
from torch_pruner.cards import CARDS
from torch_pruner.families import sketches_for
from torch_pruner.families.gpu import SUMS
from torch_pruner.families.gpu_product.space import GpuProductSketch
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, Task
from torch_pruner.tuner.released import A100_40, latency_s, product_rows


def matmul(m: int, n: int, k: int, dtype: str = "float32") -> Graph:
    b = GraphBuilder()
    x, w = b.input(0, (m, k), dtype), b.input(1, (k, n), dtype, static=True)
    return b.finish([b.pointwise("relu", b.matmul(x, w))])


def sketch_of(spec: Graph, card: str = "a100") -> GpuProductSketch:
    return GpuProductSketch(Task("t", spec, TargetSpec.cuda(CARDS[card]), 1))


def points_of(sketch: GpuProductSketch, count: int = 4000) -> np.ndarray:
    rng = np.random.default_rng(0)
    points = np.stack([rng.choice(d, count) for d in sketch.domains], axis=1)
    return points[sketch.valid(points)]


REFERENCE_MS = {
    (64, 64, 4, 4): 0.188110,
    (128, 128, 8, 8): 0.217343,
    (32, 32, 2, 2): 0.195792,
    (128, 64, 16, 8): 0.255514,
    (64, 64, 16, 16): 0.685441,
}


@pytest.mark.parametrize("tile", REFERENCE_MS, ids=str)
def test_the_releases_analyzer_gives_its_own_numbers(tile: tuple[int, ...]) -> None:
    """Pruner's release on a product of 1024 cubed with relu, an A100 with 40 GB."""
    sketch = sketch_of(matmul(1024, 1024, 1024))
    bm, bn, tm, tn = tile
    point = np.array([[bm, bn, 16, tm, tn, 1, 0, 0, 1, 1]])
    found = latency_s(product_rows(sketch.task, sketch, point), A100_40)
    assert found[0] * 1e3 == pytest.approx(REFERENCE_MS[tile], rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(128, 768, 768), (37, 45, 51), (4096, 4096, 4096)])
def test_symbols_against_counting(shape: tuple[int, int, int], dtype: str) -> None:
    """A walk over the tiles of some points, one block and one turn after another."""
    m, n, k = shape
    sketch = sketch_of(matmul(m, n, k, dtype))
    points = points_of(sketch)[:200]
    symbols = sketch.symbols(points)
    item = 4 if dtype == "float32" else 2
    for i, (bm, bn, bk, tm, tn, stages, tensor, _, split, _) in enumerate(points):
        blocks = split * sum(1 for _ in range(0, m, bm) for _ in range(0, n, bn))
        turns = sum(1 for _ in range(0, k, bk)) // split
        threads = (bm // tm) * (bn // tn) * (32 if tensor else 1)
        assert symbols.s4_tasks[i] == threads
        assert symbols.s5_traffic_bytes[i] == blocks * turns * (bm * bk + bn * bk) * item
        assert symbols.s8_ops[i] == blocks * turns * 2 * bm * bn * bk
        assert symbols.s6_rounds[i] == -(-blocks // 108)
        lines = bm * (bk + 8) if tensor else bk * (bm + 8)
        held = stages * (lines + bk * (bn + 8)) * (item if tensor else 4)
        assert symbols.s3_cache_bytes[i] == held
    assert np.isfinite(symbols.latency_s).all()
    assert (symbols.latency_s > 0).all()


@pytest.mark.parametrize("card", sorted(CARDS))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_capacities(card: str, dtype: str) -> None:
    sketch = sketch_of(matmul(512, 512, 512, dtype), card)
    points = points_of(sketch)
    symbols = sketch.symbols(points)
    assert len(points) > 100
    assert (symbols.s3_cache_bytes <= CARDS[card].shared_bytes_per_block).all()
    assert ((symbols.s4_tasks >= 32) & (symbols.s4_tasks <= 1024)).all()
    sums = points[:, 0] * points[:, 1] / symbols.s4_tasks
    assert (sums <= SUMS).all()
    if dtype == "bfloat16" and not CARDS[card].has_bfloat16:
        assert not points[:, 6:8].any()


def test_tensor_cores_and_large_tiles_are_preferred_for_large_products() -> None:
    sketch = sketch_of(matmul(4096, 4096, 4096, "float16"), "h200")
    chosen = sketch.named(sketch.default())
    assert chosen["tensor"] == 1
    assert chosen["bm"] * chosen["bn"] >= 64 * 128


@pytest.mark.parametrize("name", ["gpu_product", "gpu_warpgroup"])
def test_weights_are_packed_unless_memory_counts(name: str) -> None:
    """One decision away from the draft lies a schedule that needs no copy, and is about as fast."""
    task = Task("t", layer(128, 4096, 4096), TargetSpec.cuda(CARDS["h200"]), 1)
    (sketch,) = (s for s in sketches_for(task) if s.name == name)
    point = sketch.default()
    assert sketch.named(point)["pack"] == 1
    points = np.stack([point, point])
    points[1, sketch.names.index("pack")] = 0
    assert sketch.valid(points).all()
    packed, lies = sketch.symbols(points).latency_s
    assert packed <= lies < 1.25 * packed
    for p, copies in zip(points, (True, False), strict=True):
        found = families.signature_of(task.spec, Candidate(name, tuple(sketch.named(p).items())))
        assert any(found.packs) == copies


def test_weights_that_cannot_be_copied_as_they_lie_are_packed() -> None:
    for spec in (layer(128, 512, 516), rounded_convolution()):
        for sketch in sketches_for(Task("t", spec, TargetSpec.cuda(CARDS["h200"]), 1)):
            if "pack" in sketch.names:
                assert sketch.domains[sketch.names.index("pack")].tolist() == [1]


def rounded_convolution() -> Graph:
    b = GraphBuilder()
    x = b.input(0, (1, 64, 14, 14), "float16")
    w = b.input(1, (64, 64, 3, 3), "float16", static=True)
    ends = {"stride": (1, 1), "lo": (1, 1), "hi": (1, 1), "dilation": (1, 1), "groups": 1}
    return b.finish([b.append("conv", (x, w), (1, 64, 14, 14), "float16", **ends)])


def test_few_rows_take_small_tiles() -> None:
    """A product of 128 rows has to fill 132 multiprocessors."""
    sketch = sketch_of(matmul(128, 768, 768, "float16"), "h200")
    chosen = sketch.named(sketch.default())
    blocks = -(-128 // chosen["bm"]) * -(-768 // chosen["bn"])
    assert blocks >= 48


def test_latency_never_beats_the_card() -> None:
    sketch = sketch_of(matmul(2048, 2048, 2048, "float16"), "h200")
    symbols = sketch.symbols(points_of(sketch))
    assert (symbols.latency_s >= 2 * 2048**3 / CARDS["h200"].float16_flops).all()


def test_every_kind_of_kernel_has_a_space_on_gpus() -> None:
    b = GraphBuilder()
    x = b.input(0, (64, 256), "float32")
    kernels = {
        "gpu_elementwise": b.finish([b.pointwise("relu", x)]),
        "gpu_rows": b.finish([b.reduce("sum", x, [1])]),
        "gpu_product": matmul(64, 64, 64),
    }
    for name, spec in kernels.items():
        sketches = sketches_for(Task("t", spec, TargetSpec.cuda(CARDS["h200"]), 1))
        assert sketches[0].name == name
        for sketch in sketches:
            point = sketch.default()
            assert sketch.valid(point[None]).all()
            assert (sketch.symbols(point[None]).latency_s > 0).all()


@pytest.mark.parametrize(
    ("name", "decisions"),
    [
        ("gpu_attention", "bm bn stages ahead split heads"),
        ("gpu_columns", "threads"),
        ("gpu_direct", "threads"),
        ("gpu_dots", "threads along columns ahead early"),
        ("gpu_elementwise", "vl threads"),
        ("gpu_product", "bm bn bk tm tn stages tensor ahead split pack"),
        ("gpu_rows", "threads vl rows abreast split"),
        ("gpu_update", "vl threads"),
        ("gpu_warpgroup", "bm bn bk stages warpgroups split cluster pack early"),
    ],
)
def test_stored_schedules_know_decisions_by_these_names(name: str, decisions: str) -> None:
    family = families.named(name)
    assert family.decisions._fields == tuple(decisions.split())
    assert family.space().names == family.decisions._fields


def test_a_stored_product_that_says_nothing_of_parts_has_one() -> None:
    stored = {"bm": 16, "bn": 16, "bk": 8, "tm": 1, "tn": 1, "stages": 1, "tensor": 0, "ahead": 0}
    assert families.named("gpu_product").typed(stored).split == 1


def test_a_stored_attention_that_says_nothing_of_parts_has_one() -> None:
    found = families.named("gpu_attention").typed({"bm": 16, "bn": 32, "stages": 1, "ahead": 0})
    assert (found.split, found.heads) == (1, 1)


def test_keys_of_few_queries_are_shared_by_a_cards_blocks() -> None:
    """What 32 heads of one query leave idle, and what four of them read of the same keys."""
    case = Case(dtype="float16", queries=1, keys=4096, heads=32, kv=8, depth=64, width=64)
    task = Task("t", attention(case), TargetSpec.cuda(CARDS["h200"]), 1)
    (sketch,) = (s for s in sketches_for(task) if s.name == "gpu_attention")
    point = sketch.named(sketch.default())
    assert point["heads"] == 4
    assert 8 * point["split"] >= CARDS["h200"].multiprocessors / 2
    whole = attention(replace(case, queries=4096, kv=32))
    filled = families.named("gpu_attention").space()(replace(task, spec=whole))
    assert filled.domains[-2].tolist() == [1]


def best_for(spec: Graph, card: str = "h200") -> tuple[str, dict[str, int], float]:
    """The choice among all kernels without measuring: sketch, decisions, estimated seconds."""
    task = Task("t", spec, TargetSpec.cuda(CARDS[card]), 1)
    found = [(s.default(), s) for s in sketches_for(task)]
    timed = [(float(s.symbols(point[None]).latency_s[0]), s, point) for point, s in found]
    seconds, sketch, point = min(timed, key=lambda t: t[0])
    return sketch.name, dict(sketch.named(point)), seconds


def layer(rows: int, columns: int, depth: int, weights: str = "float16") -> Graph:
    """As torch has a layer's weights, which may be bytes."""
    b = GraphBuilder()
    x = b.input(0, (rows, depth), "float16")
    w = b.input(1, (columns, depth), weights, static=True)
    dtype = "float32" if weights == "int8" else "float16"
    return b.finish([b.append("matmul", (x, b.permute(w, (1, 0))), (rows, columns), dtype)])


@pytest.mark.parametrize("card", ["h200", "a100", "t4"])
def test_a_step_of_decoding_waits_for_its_weights_alone(card: str) -> None:
    for weights, item in (("float16", 2), ("int8", 1)):
        name, _, seconds = best_for(layer(1, 4096, 4096, weights), card)
        bound = 4096 * 4096 * item / CARDS[card].dram_bytes_per_s
        assert name == "gpu_dots"
        assert bound < seconds < 1.5 * bound + 5e-6


def test_a_step_of_decoding_reads_weights_where_they_lie() -> None:
    for weights in ("float16", "int8"):
        spec = layer(2, 512, 1024, weights)
        assert not any(families.signature_of(spec, dots_for(spec)).packs)
    turned = matmul(2, 512, 1024, "float16")  # columns lie next to each other
    assert any(families.signature_of(turned, dots_for(turned)).packs)


def dots_for(spec: Graph) -> Candidate:
    task = Task("t", spec, TargetSpec.cuda(CARDS["h200"]), 1)
    (sketch,) = (s for s in sketches_for(task) if s.name == "gpu_dots")
    return Candidate("gpu_dots", tuple(sketch.named(sketch.default()).items()))


def test_many_rows_are_no_dot_products() -> None:
    task = Task("t", layer(17, 512, 512), TargetSpec.cuda(CARDS["h200"]), 1)
    assert "gpu_dots" not in {s.name for s in sketches_for(task)}
    task = Task("t", layer(16, 512, 512, "int8"), TargetSpec.cuda(CARDS["h200"]), 1)
    assert {s.name for s in sketches_for(task)} == {
        "gpu_dots",
        "gpu_warpgroup",
        "gpu_product",
        "gpu_direct",
    }


def of_words(rows: int) -> Graph:
    b = GraphBuilder()
    x, words = b.input(0, (rows, 4096), "float16"), b.input(1, (512, 4096), "int32", static=True)
    scales = b.input(2, (64, 4096), "bfloat16", static=True)
    given, attrs = (x, words, scales), {"bits": 4, "group": 64}
    return b.finish([b.append("matmul_grouped", given, (rows, 4096), "float32", **attrs)])


def test_words_are_read_once() -> None:
    name, _, seconds = best_for(of_words(1), "a100")
    bound = 4096 * 4096 * 0.53 / CARDS["a100"].dram_bytes_per_s
    assert name == "gpu_dots"
    assert bound < seconds < 1.5 * bound + 4e-6
    name, chosen, _ = best_for(of_words(512), "a100")
    assert (name, chosen["tensor"]) == ("gpu_product", 1)


def test_a_first_operand_that_is_computed_is_kept_if_a_block_has_room() -> None:
    def spec(rows: int) -> Graph:
        b = GraphBuilder()
        x = b.pointwise("relu", b.input(0, (rows, 8192), "float16"))
        return b.finish([b.matmul(x, b.permute(b.input(1, (512, 8192), "float16"), (1, 0)))])

    def shared(rows: int) -> float:
        task = Task("t", spec(rows), TargetSpec.cuda(CARDS["h200"]), 1)
        (sketch,) = (s for s in sketches_for(task) if s.name == "gpu_dots")
        return float(sketch.symbols(sketch.default()[None]).s3_cache_bytes[0])

    assert shared(3) > 3 * 8192 * 2
    assert shared(4) < 8192


def rows_of(spec: Graph, card: str = "h200") -> dict[str, int]:
    """The choice among kernels of rows, without measuring."""
    task = Task("t", spec, TargetSpec.cuda(CARDS[card]), 1)
    (sketch,) = (s for s in sketches_for(task) if s.name == "gpu_rows")
    return dict(sketch.named(sketch.default()))


def squares(shape: tuple[int, ...], axes: list[int], dtype: str = "float16") -> Graph:
    b = GraphBuilder()
    x = b.cast(b.input(0, shape, dtype), "float32")
    return b.finish([b.reduce("sum", b.pointwise("mul", x, x), axes)])


def test_long_rows_are_read_in_vectors() -> None:
    assert rows_of(squares((4096, 4096), [1]))["vl"] == 4
    assert rows_of(squares((4096, 4098), [1]))["vl"] == 2
    assert rows_of(squares((4096, 4097), [1]))["vl"] == 1


def test_integers_are_read_one_by_one() -> None:
    b = GraphBuilder()
    x = b.input(0, (512, 128), "int64")
    known = b.pointwise("ne", x, b.const(0, "int64"))
    spec = b.finish([b.reduce("sum", b.cast(known, "int64"), [1])])
    assert rows_of(spec)["vl"] == 1


def test_short_rows_share_a_block() -> None:
    chosen = rows_of(squares((100_000, 64), [1]))
    assert (chosen["threads"], chosen["abreast"]) == (32, 0)
    assert chosen["rows"] > 1


def test_sums_over_tokens_lie_abreast() -> None:
    """Of neighbours in memory each is of another sum: a warp has one thread of each."""
    spec = squares((4096, 768), [0])
    chosen = rows_of(spec)
    assert (chosen["rows"], chosen["abreast"]) == (32, 1)
    task = Task("t", spec, TargetSpec.cuda(CARDS["h200"]), 1)
    seconds = {s.name: float(s.symbols(s.default()[None]).latency_s[0]) for s in sketches_for(task)}
    assert seconds["gpu_rows"] < seconds["gpu_columns"] / 4  # which has a thread for each sum


def test_few_long_rows_are_shared_by_blocks() -> None:
    """One row of all elements of a loss, and few channels of a batch."""
    for spec in (squares((1 << 22,), [0], "float32"), squares((32, 3136, 64), [0, 1])):
        assert rows_of(spec)["split"] > 1
    assert rows_of(squares((4096, 4096), [1]))["split"] == 1


def test_rows_that_lie_across_memory_are_read_abreast() -> None:
    """A norm of channels, which torch sees last and memory has first."""
    b = GraphBuilder()
    x = b.permute(b.input(0, (8, 96, 3136), "float16"), (0, 2, 1))
    wide = b.cast(x, "float32")
    spec = b.finish([b.reduce("sum", b.pointwise("mul", wide, wide), [2])])
    assert rows_of(spec)["abreast"] == 1


def test_parts_of_a_sum_stay_in_shared_memory() -> None:
    """A second launch costs more than blocks that read each other's shared memory."""
    task = Task("t", matmul(128, 768, 3072, "float16"), TargetSpec.cuda(CARDS["h200"]), 1)
    (sketch,) = (s for s in sketches_for(task) if s.name == "gpu_warpgroup")
    points = points_of(sketch, 20_000)
    split, cluster = (points[:, sketch.names.index(name)] for name in ("split", "cluster"))
    assert (split[cluster == 1] > 1).all()
    chosen = sketch.named(sketch.default())
    assert chosen["split"] == 1 or chosen["cluster"] == 1


def test_stored_rows_and_products_by_warpgroups_that_say_less() -> None:
    assert families.named("gpu_rows").typed({"threads": 64}) == (64, 1, 1, 0, 1)
    stored = {"bm": 64, "bn": 64, "bk": 64, "stages": 4, "warpgroups": 1, "split": 2}
    assert families.named("gpu_warpgroup").typed(stored)[-3:] == (0, 1, 0)
