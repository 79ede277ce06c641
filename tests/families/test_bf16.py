"""Products of bfloat16 by AVX512-BF16 and by AMX against the reference interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from torch_pruner.codegen.build.lower import compile_module, program_module
from torch_pruner.families.bf16_pairs.form import takes_pairs
from torch_pruner.families.bf16_pairs.space import Bf16PairsSketch
from torch_pruner.families.bf16_tiles.space import Bf16TilesSketch
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.target import TargetSpec, tiles_allowed
from torch_pruner.task import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.families.space import Sketch

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

TARGET = TargetSpec.detect(2)
DOT = {"tm": 6, "nv": 2, "mc": 1, "order": 0, "ku": 2, "tasks": 2, "ahead": 0, "way": 0}
TILES = {"rt": 2, "nv": 2, "mc": 1, "order": 0, "ku": 1, "tasks": 2, "ahead": 0, "way": 0}
BOUND = 1e-2  # of the largest result: bfloat16 has 8 bits

dot = pytest.mark.skipif(not TARGET.bf16_dot, reason="needs AVX512-BF16")
tiles = pytest.mark.skipif(
    not (TARGET.bf16_tiles and tiles_allowed()), reason="needs AMX with bfloat16"
)
either = pytest.mark.parametrize(
    ("sketch", "decisions"),
    [pytest.param("bf16_pairs", DOT, marks=dot), pytest.param("bf16_tiles", TILES, marks=tiles)],
)


def linear(m: int, n: int, k: int, *, static: bool = True) -> Graph:
    return K.linear(m, n, k, static=static, dtype="bfloat16")


def scores(heads: int, rows: int, dim: int, *, extra: int = 0) -> Graph:
    """Queries and keys of several heads in one buffer, both read through views."""
    b = GraphBuilder()
    width = heads * dim
    x = b.input(0, (1, rows, 2 * width + extra), "bfloat16")
    parts = [b.slice(x, (0, 0, s), (1, rows, width)) for s in (0, width)]
    q, k = (b.permute(b.reshape(t, (1, rows, heads, dim)), (0, 2, 1, 3)) for t in parts)
    y = b.matmul(q, b.permute(k, (0, 1, 3, 2)))
    return b.finish([b.pointwise("mul", y, b.const(0.5, "bfloat16"))])


def produced(m: int, n: int, k: int) -> Graph:
    """A first operand that the kernel computes."""
    b = GraphBuilder()
    x, w = b.input(0, (m, k), "bfloat16"), b.input(1, (k, n), "bfloat16", static=True)
    return b.finish([b.matmul(b.pointwise("relu", x), w)])


def rounded_late(m: int, n: int, k: int) -> Graph:
    """Sums in float32, as linear layers have them: rounded after the bias."""
    b = GraphBuilder()
    x, w = b.input(0, (m, k), "bfloat16"), b.input(1, (k, n), "bfloat16", static=True)
    y = b.append("matmul", (x, w), (m, n), "float32")
    bias = b.append("broadcast", (b.input(2, (n,), "float32", static=True),), (m, n), "float32")
    return b.finish([b.pointwise("cast", b.pointwise("add", y, bias), dtype="bfloat16")])


def agrees(spec: Graph, sketch: str, decisions: Mapping[str, int]) -> None:
    outputs, expected, _ = K.run(spec, sketch, decisions)
    assert K.error(outputs, expected) < BOUND


@either
@pytest.mark.parametrize("rows", [*range(1, 18), 31, 33, 47, 100])
def test_every_number_of_rows(sketch: str, decisions: dict[str, int], rows: int) -> None:
    changes = {"tm": min(6, rows)} if sketch == "bf16_pairs" else {"rt": 1 if rows <= 16 else 2}
    agrees(linear(rows, 48, 64), sketch, decisions | changes)


@either
@pytest.mark.parametrize("depth", [1, 2, 3, 31, 32, 33, 63, 96, 100, 127])
@pytest.mark.parametrize("static", [True, False])
def test_every_depth(sketch: str, decisions: dict[str, int], depth: int, static: bool) -> None:
    agrees(linear(19, 40, depth, static=static), sketch, decisions)


@either
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 31, 32, 50])
@pytest.mark.parametrize("static", [True, False])
def test_every_width(sketch: str, decisions: dict[str, int], columns: int, static: bool) -> None:
    agrees(linear(20, columns, 64, static=static), sketch, decisions)


@either
@pytest.mark.parametrize(
    "spec",
    [
        scores(4, 33, 32),
        scores(3, 20, 15, extra=7),
        scores(2, 64, 64),
        produced(23, 33, 45),
        rounded_late(23, 33, 64),
    ],
    ids=["scores", "odd scores", "even scores", "produced", "rounded late"],
)
def test_operands_through_views(sketch: str, decisions: dict[str, int], spec: Graph) -> None:
    agrees(spec, sketch, decisions)


@either
@pytest.mark.parametrize(("m", "n", "k"), [(32, 48, 64), (40, 70, 50), (17, 16, 16), (9, 33, 41)])
@pytest.mark.parametrize("batch", [0, 3])
def test_operands_that_lie_turned(
    sketch: str, decisions: dict[str, int], m: int, n: int, k: int, batch: int
) -> None:
    """As in the gradients of a layer's weights, whose rows are neighbours."""
    agrees(K.turned(m, n, k, batch=batch, dtype="bfloat16"), sketch, decisions)


@pytest.mark.parametrize(
    "kind", [pytest.param(Bf16PairsSketch, marks=dot), pytest.param(Bf16TilesSketch, marks=tiles)]
)
@pytest.mark.parametrize(
    "spec",
    [
        linear(70, 70, 96),
        linear(9, 130, 40),
        linear(33, 70, 96, static=False),
        scores(3, 40, 32),
        K.turned(50, 40, 70, dtype="bfloat16"),
    ],
    ids=["a", "b", "changing", "scores", "turned"],
)
def test_points_of_the_space(kind: type[Sketch], spec: Graph) -> None:
    for decisions in K.points(kind(Task("kernel", spec, TARGET, 2)), 12):
        agrees(spec, kind.name, decisions)


@either
def test_zeros_that_pad_the_reduction_meet_no_garbage(
    sketch: str, decisions: dict[str, int]
) -> None:
    """What lies past a row's end may be NaN, and NaN times zero is NaN."""
    spec = linear(16, 16, 33)
    outputs, expected, _ = K.run(spec, sketch, decisions)
    assert np.isfinite(outputs[0].astype(np.float32)).all()
    assert K.error(outputs, expected) < BOUND


@pytest.mark.parametrize(
    ("sketch", "decisions", "mcpu", "instruction"),
    [
        ("bf16_pairs", DOT, "znver4", "vdpbf16ps"),
        ("bf16_pairs", DOT, "sapphirerapids", "vdpbf16ps"),
        ("bf16_tiles", TILES, "sapphirerapids", "tdpbf16ps"),
    ],
)
def test_code_for_other_machines(
    sketch: str, decisions: dict[str, int], mcpu: str, instruction: str
) -> None:
    """Two kernels in a program, as networks have them."""
    target = TargetSpec.from_dict({"kind": "llvm", "mcpu": mcpu}, 2)
    kernels = {
        "one": schedule(linear(40, 48, 64), sketch, decisions),
        "two": schedule(linear(24, 40, 33), sketch, decisions),
    }
    text = compile_module(program_module(kernels, {"main": _calls(kernels)}, 8), target)
    assert instruction in text.inspect_source("asm")


def _calls(kernels: Mapping[str, object]) -> list[object]:
    from torch_pruner.graph.memory import KernelCall, Place

    counts = {n: len(k.inputs) + len(k.outputs) + len(k.scratch) for n, k in kernels.items()}
    return [KernelCall(n, tuple(Place(i) for i in range(c))) for n, c in counts.items()]


def test_sums_may_stay_wide() -> None:
    assert takes_pairs(rounded_late(8, 8, 8))
    assert takes_pairs(linear(8, 8, 8))
    assert not takes_pairs(K.linear(8, 8, 8))


@tiles
def test_tiles_are_released() -> None:
    """Every task that loads a tile configuration gives it back, also in the last task."""
    text = K.run(linear(40, 48, 64), "bf16_tiles", TILES)[2]._library.inspect_source("asm")
    assert text.count("ldtilecfg") == text.count("tilerelease") > 0
