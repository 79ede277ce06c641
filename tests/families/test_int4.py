"""Weights of four bits: kernels that read them, at sizes that divide and sizes that do not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from torch_pruner.codegen.build.kernel_object import Division
from torch_pruner.codegen.build.region import parts_of
from torch_pruner.families import sketches_for
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.nibbles import CONVERTED, DIGITS, IN_MANTISSA, LOOKED_UP
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]


def product(
    rows: int,
    columns: int,
    depth: int,
    group: int = 64,
    *,
    dtype: str = "float32",
    offsets: bool = False,
    bits: int = 4,
) -> Graph:
    b = GraphBuilder()
    groups = -(-depth // group)
    x = b.input(0, (rows, depth), dtype)
    words = b.input(1, (-(-depth * bits // 32), columns), "int32", static=True)
    scales = [
        b.input(2 + i, (groups, columns), ("bfloat16", "float32")[i], static=True)
        for i in range(1 + offsets)
    ]
    total = b.append(
        "matmul_grouped", (x, words, *scales), (rows, columns), "float32", bits=bits, group=group
    )
    return b.finish([b.cast(b.pointwise("relu", total), dtype)])


@pytest.fixture(autouse=True)
def whole_words(monkeypatch):
    """Words of all bits, where other integers are small."""
    given = K.inputs_for

    def inputs(spec: Graph, seed: int = 0) -> list[K.Array]:
        arrays = given(spec, seed)
        arrays[1][...] = np.random.default_rng(1).integers(-(2**31), 2**31, arrays[1].shape)
        return arrays

    monkeypatch.setattr(K, "inputs_for", inputs)


@pytest.mark.parametrize(
    ("bits", "dtype", "offsets"),
    [(4, "float32", False), (4, "float32", True), (4, "bfloat16", False), (8, "float32", True)],
)
@pytest.mark.parametrize(
    "shape", [(1, 256, 128), (1, 65, 100), (2, 96, 203), (5, 48, 33), (16, 40, 64), (40, 130, 96)]
)
def test_points_of_the_spaces(
    shape: tuple[int, int, int], bits: int, dtype: str, offsets: bool
) -> None:
    spec = product(*shape, 32 if shape[2] == 203 else 64, bits=bits, dtype=dtype, offsets=offsets)
    sketches = sketches_for(Task("int4", spec, TargetSpec.detect(2), 2))
    names = ["int4_rows", "int4_panels"] if shape[0] <= 16 else ["int4_panels"]
    assert [s.name for s in sketches] == names
    for sketch in sketches:
        points = K.points(sketch, 3)
        for decisions in points:
            outputs, expected, _ = K.run(spec, sketch.name, decisions)
            assert K.error(outputs, expected) < (1e-5 if dtype == "float32" else 1e-2)
        pack = schedule(spec, sketch.name, points[0]).packs[1]
        assert pack is not None
        assert pack.nbytes < (shape[1] + 64) * (shape[2] + 8) * bits / 4, "no floats"


@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_of_one_tile(rows: int) -> None:
    """TVM divided by zero: the index of such a tile added where a block begins and took it away."""
    point = {"vl": 8, "tm": rows, "nv": 1, "mc": 1, "order": 0, "ku": 4, "pack": 1, "par": 0}
    point |= {"ahead": 0, "kb": 2}
    outputs, expected, _ = K.run(product(rows, 48, 512), "int4_panels", point)
    assert K.error(outputs, expected) < 1e-5


@pytest.mark.parametrize("shape", [(1, 80, 200), (3, 33, 130)])
@pytest.mark.parametrize("early", [0, 1])
def test_ways_to_floats_are_exact(shape: tuple[int, int, int], early: int) -> None:
    """Converted, looked up or set into a mantissa: all numbers at all places, the same bits."""
    spec = product(*shape)
    sketch = next(
        s
        for s in sketches_for(Task("int4", spec, TargetSpec.detect(2), 2))
        if s.name == "int4_rows"
    )
    table = sketch.names.index("table")
    found = {}
    for way in {CONVERTED, *(int(w) for w in sketch.domains[table])} - {DIGITS}:
        point = {"vl": sketch.lanes, "nv": 2, "split": 1, "early": early, "table": way}
        outputs, expected, _ = K.run(spec, "int4_rows", point | {"ahead": 0, "par": 0})
        assert K.error(outputs, expected) < 1e-5
        found[way] = outputs[0].view(np.uint32)
    assert len(found) >= 2
    assert all(np.array_equal(bits, found[CONVERTED]) for bits in found.values())


def test_which_way_is_drafted() -> None:
    """Digits where floats take longer than memory; else numbers are looked up."""
    ways = {"znver4": DIGITS, "znver5": LOOKED_UP, "skylake-avx512": LOOKED_UP}
    ways |= {"znver3": DIGITS, "haswell": DIGITS}
    for mcpu, way in ways.items():
        target = TargetSpec.from_dict({"kind": "llvm", "mcpu": mcpu}, 2)
        (sketch, *_) = sketches_for(Task("int4", product(1, 768, 3072), target, 2))
        assert dict(sketch.named(sketch.default()))["table"] == way, mcpu


@pytest.mark.parametrize(
    ("shape", "group"),
    [
        ((1, 65, 400), 128),
        ((1, 40, 400), 48),
        ((2, 24, 300), 80),
        ((2, 16, 203), 32),
        ((3, 9, 64), 16),
    ],
)
def test_digits_of_groups_of_any_size(shape: tuple[int, int, int], group: int) -> None:
    """Groups of which sums of sixteen bits hold a part, and depths that end within one."""
    spec = product(*shape, group)
    lanes = digit_lanes(spec)
    for vectors in (1, 2):
        point = {"vl": lanes, "nv": vectors, "split": 1, "early": 0, "table": DIGITS}
        outputs, expected, _ = K.run(spec, "int4_rows", point | {"ahead": 2048, "par": 0})
        assert K.error(outputs, expected) < 1e-5


@pytest.mark.parametrize("word", [-0x77777778, 0x77777777])
def test_digits_that_are_all_the_least(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 digits of -128 by weights of -8 are one more than sixteen bits hold."""
    spec = product(1, 48, 128)
    lanes = digit_lanes(spec)
    given = K.inputs_for

    def inputs(spec: Graph, seed: int = 0) -> list[K.Array]:
        arrays = given(spec, seed)
        arrays[0][...] = 1 + 2.0**-14
        arrays[1][...] = word
        return arrays

    monkeypatch.setattr(K, "inputs_for", inputs)
    point = {"vl": lanes, "nv": 2, "split": 1, "early": 0, "table": DIGITS, "ahead": 0, "par": 0}
    outputs, expected, _ = K.run(spec, "int4_rows", point)
    assert K.error(outputs, expected) < 1e-5


def digit_lanes(spec: Graph) -> int:
    """Of the vectors of this processor, where it multiplies digits."""
    (sketch, *_) = sketches_for(Task("int4", spec, TargetSpec.detect(2), 2))
    if DIGITS not in sketch.domains[sketch.names.index("table")]:
        pytest.skip("no products of digits here")
    lanes: int = sketch.lanes
    return lanes


@pytest.mark.parametrize("rows", [1, 2])
def test_digits_are_a_part_of_their_own(rows: int) -> None:
    """So that a program divides the panels among its threads, and every thread makes the digits."""
    spec = product(rows, 96, 128)
    point = {"vl": 16, "nv": 2, "split": 1, "early": 0, "table": DIGITS, "ahead": 0, "par": 1}
    (_, digits), (_, panels) = parts_of(schedule(spec, "int4_rows", point))
    assert digits == Division(None if rows == 1 else rows)
    assert panels == Division(3)


@pytest.mark.parametrize("value", [0.0, 1e-36, 1e30, float("inf"), float("-inf"), float("nan")])
def test_what_fixed_point_cannot_hold_is_taken_as_floats(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One element of a row, in a group of its own and beside ordinary ones."""
    spec = product(2, 48, 200)
    lanes = digit_lanes(spec)
    given = K.inputs_for

    def inputs(spec: Graph, seed: int = 0) -> list[K.Array]:
        arrays = given(spec, seed)
        arrays[0][0, :64] = 0.0
        arrays[0][0, 3] = value
        arrays[0][1, 70] = 0.0 if value < 1 else value
        return arrays

    monkeypatch.setattr(K, "inputs_for", inputs)
    point = {"vl": lanes, "nv": 2, "split": 1, "early": 0, "ahead": 0, "par": 0}
    fixed, floats = (
        K.run(spec, "int4_rows", point | {"table": way})[0][0] for way in (DIGITS, IN_MANTISSA)
    )
    most = np.abs(floats[np.isfinite(floats)]).max(initial=0.0)
    np.testing.assert_allclose(fixed, floats, rtol=1e-5, atol=1e-6 * most)
