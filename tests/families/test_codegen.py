"""Every emitter against the reference interpreter, at sizes that fill tiles and that do not."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from torch_pruner.families.contraction import emit as contraction
from torch_pruner.families.contraction.form import ContractionDecisions
from torch_pruner.families.rows.form import joined_axes, parted_axis, whole_run
from torch_pruner.graph.contraction import constant_operand, contraction_of, is_widened
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.ops import FLOATS

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

TILE = {
    "vl": 16,
    "tm": 8,
    "nv": 2,
    "mc": 1,
    "order": 0,
    "ku": 1,
    "pack": 1,
    "par": 1,
    "ahead": 0,
    "kb": 1,
}


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (K.linear(128, 768, 256), {}),
        (K.linear(37, 41, 50), {"tm": 6, "ku": 4, "mc": 3}),
        (K.linear(37, 41, 50), {"tm": 6, "nv": 1, "ku": 4, "ahead": 1}),
        (K.linear(37, 41, 90), {"tm": 6, "ku": 2, "mc": 3, "order": 1, "ahead": 1}),
        (K.linear(1, 100, 64), {"tm": 1, "nv": 1, "par": 0, "ahead": 1}),
        (K.linear(4, 100, 64), {"tm": 4, "nv": 4, "ku": 4, "ahead": 1}),
        (K.linear(37, 48, 50, static=False), {"tm": 6, "order": 1, "mc": 2}),
        (K.linear(37, 41, 50, static=False), {"tm": 6, "pack": 0}),
        (K.linear(37, 41, 50, static=False), {"tm": 6}),  # squares that overlap, columns cut
        (K.linear(37, 41, 24, static=False), {"vl": 8, "nv": 3, "kb": 2}),
        (K.linear(37, 41, 10, static=False), {"tm": 6}),  # no square fits the reduction
        (K.linear(1, 100, 64), {"tm": 1, "nv": 4, "par": 0}),
        (K.linear(16, 32, 64, dtype="bfloat16"), {}),
        (K.attention_scores(4, 33, 16), {}),
        (K.conv(16, 14, 32, 3, 1, 1), {"tm": 7}),
        (K.conv(16, 14, 40, 1, 1, 0), {"tm": 14, "mc": 2}),
        (K.conv(20, 7, 40, 1, 1, 0, static=False), {"tm": 7, "nv": 2}),
        (K.conv(40, 7, 40, 1, 1, 0, groups=2, static=False), {"tm": 7, "nv": 1}),
        (K.conv(24, 7, 32, 3, 2, 1), {"tm": 5}),
        (K.conv(3, 32, 16, 7, 2, 3), {"nv": 1}),
        (K.conv(24, 7, 64, 3, 1, 1), {"tm": 7, "ku": 4, "ahead": 1}),
        (K.conv(32, 14, 32, 3, 1, 1, 32), {}),
        (K.conv(24, 14, 24, 5, 2, 2, 24), {"nv": 1}),
        (K.conv(16, 9, 32, 3, 2, 1, 4), {"nv": 1}),
        (K.conv(8, 20, 16, 3, 1, 1, rank=1), {"nv": 1}),
        (K.conv(4, 6, 16, 3, 1, 1, rank=3, batch=2), {"nv": 1}),
        (K.conv(32, 17, 40, 3, 1, 1), {"tm": 6}),  # the last tile of a line begins earlier
        (K.conv(32, 17, 40, 3, 1, 1), {"tm": 7, "nv": 3, "mc": 2, "order": 1}),  # crosses lines
        (K.conv(32, 9, 72, 1, 1, 0), {"tm": 6, "nv": 4, "mc": 4, "order": 1}),
        (K.conv(32, 9, 24, 1, 1, 0, batch=2), {"tm": 8, "nv": 1, "mc": 2}),
        (K.linear(37, 41, 24), {"vl": 8, "nv": 3, "mc": 2, "order": 1, "ahead": 1}),  # half vectors
        (K.conv(32, 9, 40, 3, 1, 1), {"vl": 8, "nv": 3, "tm": 9, "mc": 2}),
        (K.linear(37, 41, 24, static=False), {"vl": 8, "nv": 3, "pack": 0}),
        (K.linear(37, 41, 50, static=False), {"tm": 6, "pack": 2}),
        (K.linear(37, 41, 530, static=False), {"tm": 5, "nv": 2, "pack": 2, "kb": 2, "order": 1}),
        (
            K.linear(9, 48, 512, static=False),
            {"tm": 4, "nv": 3, "pack": 2, "kb": 2, "par": 0, "mc": 1},
        ),
        (K.changing(37, 90, 530), {"tm": 6, "pack": 2, "kb": 2}),
        (K.changing(20, 64, 33), {"tm": 6, "nv": 2, "pack": 2}),
        (K.linear(16, 32, 4096), {"kb": 4, "ku": 4}),
        (K.linear(13, 40, 1536), {"kb": 3, "mc": 2, "order": 1, "ahead": 1, "ku": 4}),
        (K.linear(13, 40, 1536), {"kb": 2, "tm": 4, "nv": 2, "ahead": 1, "par": 0}),
        (K.linear(13, 40, 1536, static=False), {"kb": 6}),
        (K.conv(128, 8, 40, 3, 2, 1), {"tm": 4, "kb": 3, "ahead": 1, "ku": 2}),
        (K.conv(256, 9, 72, 3, 1, 1), {"tm": 5, "nv": 4, "kb": 9, "mc": 2, "order": 1}),
        (K.conv(512, 9, 24, 3, 1, 1, rank=1), {"nv": 1, "kb": 3, "tm": 3}),
        (K.conv_transpose(12, 4, 20, 4, 2, 1), {"nv": 1}),
        (K.conv_transpose(10, 1, 16, 4, 1, 0), {"nv": 1, "tm": 4}),
    ],
)
def test_contractions(spec: Graph, changes: dict[str, int]) -> None:
    outputs, expected, _ = K.run(spec, "contraction", {**TILE, **changes})
    bound = 1e-2 if spec.nodes[spec.outputs[0]].dtype == "bfloat16" else 1e-5
    assert K.error(outputs, expected) < bound


BFLOAT16, FLOAT16 = {"dtype": "bfloat16"}, {"dtype": "float16"}


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (K.linear(37, 90, 50, **BFLOAT16), {"tm": 6, "ku": 4, "mc": 3}),
        (K.linear(37, 90, 768, **BFLOAT16), {"tm": 6, "kb": 3, "ku": 4, "ahead": 1}),
        (K.linear(37, 90, 768, **FLOAT16), {"tm": 6, "kb": 2, "mc": 2, "order": 1, "par": 0}),
        (K.linear(37, 48, 50, static=False, **BFLOAT16), {"tm": 6, "order": 1, "mc": 2}),
        (K.linear(37, 64, 50, static=False, **FLOAT16), {"tm": 6}),
        (K.attention_scores(4, 33, 16, **BFLOAT16), {}),
        (K.conv(16, 14, 32, 3, 1, 1, **BFLOAT16), {"tm": 7}),
        (K.conv(16, 14, 40, 1, 1, 0, **FLOAT16), {"tm": 14, "mc": 2}),
        (K.conv(24, 13, 32, 1, 2, 0, **BFLOAT16), {"tm": 7}),
        (K.conv(256, 9, 72, 3, 1, 1, **BFLOAT16), {"tm": 5, "kb": 9, "mc": 2, "order": 1}),
        (K.conv(16, 9, 32, 3, 2, 1, 4, **BFLOAT16), {"nv": 1, "tm": 5}),
    ],
)
def test_narrow_operands_become_float32_before_tiles_read_them(
    spec: Graph, changes: dict[str, int]
) -> None:
    con = contraction_of(spec)
    constant = constant_operand(spec, con) is not None
    assert is_widened(spec, con, constant, ContractionDecisions(**{**TILE, **changes}))
    outputs, expected, _ = K.run(spec, "contraction", {**TILE, **changes})
    assert K.error(outputs, expected) < 1e-2


@pytest.mark.parametrize(
    "changes", [{"tm": 16}, {"nv": 4, "kb": 1}]
)  # few tiles; a panel of 196 KB
def test_where_conversion_pays_less_tiles_convert(changes: dict[str, int]) -> None:
    spec = K.linear(37, 90, 768, dtype="bfloat16")
    decisions = {**TILE, "tm": 6, **changes}
    assert not is_widened(spec, contraction_of(spec), True, ContractionDecisions(**decisions))
    outputs, expected, _ = K.run(spec, "contraction", decisions)
    assert K.error(outputs, expected) < 1e-2


def test_the_next_panel_is_fetched_once_per_panel() -> None:
    """Over the tiles of a panel every line of the next one, also when tiles do not divide."""
    calls = []
    for ahead in (0, 1):
        decisions = {**TILE, "tm": 6, "ku": 4, "ahead": ahead}
        built = K.run(K.linear(64, 512, 64), "contraction", decisions)[2]
        text = built._library.inspect_source("ll")
        calls.append(len(re.findall(r"call void @llvm\.prefetch", text)))
    assert calls[0] == 0
    steps, tiles, lines = 512 // 4, 11, 512 * 2
    assert calls[1] * steps * tiles >= lines


def test_a_panel_of_one_tile_is_fetched_as_a_stream() -> None:
    """As many lines in a step as the step reads, a fixed distance ahead of it."""
    decisions = {**TILE, "tm": 4, "nv": 2, "ku": 4, "ahead": 1}
    built = K.run(K.linear(4, 512, 64), "contraction", decisions)[2]
    text = built._library.inspect_source("ll")
    assert len(re.findall(r"call void @llvm\.prefetch", text)) == 4 * 2


@pytest.mark.parametrize("apart", [0, 1])
@pytest.mark.parametrize("width", [512, 197, 5])
@pytest.mark.parametrize("make", [K.layer_norm, K.softmax])
def test_rows(make: Any, width: int, apart: int) -> None:
    spec = make((2, 9, width))
    decisions = {"vl": 16, "lanes": 4, "chunk": 4, "par": 1, "apart": apart}
    outputs, expected, _ = K.run(spec, "rows", decisions)
    assert K.error(outputs, expected) < 1e-5


@pytest.mark.parametrize(("shape", "axes", "place"), [
    ((8, 6, 41), (1, 2), None), ((3, 8, 41), (1, 2), 0), ((4, 5, 3, 64), (0, 1, 3), 0),
    ((3, 5, 64), (1, 2), 1), ((12, 40), (0, 1), 0), ((7, 256), (1,), 0), ((7, 250), (1,), None),
])  # fmt: skip
def test_parts_of_a_row_side_by_side(
    shape: tuple[int, ...], axes: tuple[int, ...], place: int | None
) -> None:
    b = GraphBuilder()
    x = b.input(0, shape, "float32")
    spec = b.finish([b.reduce("sum", b.pointwise("mul", x, x), axes)])
    assert parted_axis(spec, 4, 16) == place
    decisions = {"vl": 16, "lanes": 4, "chunk": 2, "par": 1, "apart": 1}
    outputs, expected, _ = K.run(spec, "rows", decisions)
    assert K.error(outputs, expected) < 1e-5


def _reduction(op: str, axes: tuple[int, ...], dtype: str = "float32") -> Graph:
    b = GraphBuilder()
    x = b.input(0, (6, 17, 41), dtype)
    return b.finish([b.reduce(op, x, axes, dtype="int64" if op.startswith("arg") else dtype)])


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("axes", [(0,), (0, 1), (1,), (2,), (1, 2)])
def test_reductions_both_ways(op: str, axes: tuple[int, ...]) -> None:
    spec = _reduction(op, axes)
    for sketch, extra in (("columns", {}), ("rows", {"lanes": 2, "apart": 0})):
        outputs, expected, _ = K.run(spec, sketch, {"vl": 16, "chunk": 8, "par": 1, **extra})
        assert K.error(outputs, expected) < 1e-5


_ROWS = {"vl": 16, "chunk": 3, "par": 1}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("op", ["argmax", "argmin"])
@pytest.mark.parametrize("shape", [(5, 70, 33), (3, 16, 64), (2, 3, 7), (1, 1, 130)])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8", "int64"])
@pytest.mark.parametrize(
    ("sketch", "decisions"),
    [
        ("columns", {**_ROWS, "vl": 1}),
        ("columns", _ROWS),
        ("rows", {**_ROWS, "lanes": 1, "apart": 0}),
        ("rows", {**_ROWS, "lanes": 4, "apart": 0}),
    ],
    ids=str,
)
def test_arg_reductions(
    op: str, shape: tuple[int, ...], axis: int, dtype: str, sketch: str, decisions: dict[str, int]
) -> None:
    """Among many equals the first, a NaN before every number, and rows of the least of all."""
    b = GraphBuilder()
    spec = b.finish([b.reduce(op, b.input(0, shape, dtype), (axis,), dtype="int64")])
    (x,) = inputs = K.inputs_for(spec)
    rng = np.random.default_rng(1)
    x[...] = rng.integers(-3, 4, shape)
    if dtype in FLOATS:
        x[rng.random(shape) < 0.1] = np.nan
        x[0] = -np.inf if op == "argmax" else np.inf
    outputs, expected, _ = K.run(spec, sketch, decisions, inputs=inputs)
    np.testing.assert_array_equal(outputs[0], expected[0])


def _viewed_rows(kind: str) -> Graph:
    """Rows whose last axis a view made of axes that lie apart, or of one that it took apart."""
    b = GraphBuilder()
    if kind == "joined":
        x = b.permute(b.input(0, (3, 20, 35), "float32"), (0, 2, 1))
        x = b.reshape(x, (105, 20))
        axes: tuple[int, ...] = (0,)
    elif kind == "joined twice":
        x = b.permute(b.input(0, (4, 20, 3, 18), "float32"), (0, 2, 3, 1))
        x = b.reshape(x, (4 * 54, 20))
        axes = (0,)
    elif kind == "taken apart":
        x = b.reshape(b.input(0, (3, 20, 49), "float32"), (3, 20, 7, 7))
        axes = (0, 2, 3)
    elif kind == "short":
        x = b.input(0, (3, 20, 5, 6), "float32")
        axes = (2, 3)
    else:  # a row and a column beside it, which are not one line
        x = b.input(0, (3, 20, 6, 6), "float32")
        x = b.pointwise("mul", x, b.broadcast(b.input(1, (6, 1), "float32"), (3, 20, 6, 6)))
        axes = (2, 3)
    shape = b.shape(x)
    total = b.reduce("sum", x, axes, keepdim=True)
    rest = b.pointwise("sub", x, b.broadcast(total, shape))
    return b.finish([b.pointwise("exp", rest), b.reduce("max", rest, axes)])


@pytest.mark.parametrize("kind", ["joined", "joined twice", "taken apart", "short", "beside"])
@pytest.mark.parametrize(("vl", "lanes"), [(16, 1), (16, 2), (8, 4), (4, 2)])
@pytest.mark.parametrize("apart", [0, 1])
def test_rows_along_views(kind: str, vl: int, lanes: int, apart: int) -> None:
    spec = _viewed_rows(kind)
    if apart and parted_axis(spec, lanes, vl) is None:
        pytest.skip("no parts")
    decisions = {"vl": vl, "lanes": lanes, "chunk": 7, "par": 1, "apart": apart}
    outputs, expected, _ = K.run(spec, "rows", decisions)
    assert K.error(outputs, expected) < 1e-5


def test_what_rows_are_swept_along() -> None:
    assert whole_run(_viewed_rows("joined"), 16) == 35
    assert whole_run(_viewed_rows("joined twice"), 16) == 54
    assert whole_run(_viewed_rows("joined"), 64) == 105  # no vector is as short
    assert joined_axes(_viewed_rows("taken apart"), 16) == 2
    assert joined_axes(_viewed_rows("short"), 16) == 2
    assert joined_axes(_viewed_rows("beside"), 16) == 1


def test_places_beside_other_reductions_and_values() -> None:
    """Powers of rows, their sum, and which is the largest of what they are powers of."""
    b = GraphBuilder()
    x = b.input(0, (6, 75), "float32")
    first = b.reduce("argmax", b.pointwise("neg", x), (1,), dtype="int64")
    powers = b.pointwise("exp", x)
    total = b.reduce("sum", powers, (1,), keepdim=True)
    share = b.pointwise("div", powers, b.broadcast(total, (6, 75)))
    spec = b.finish([share, b.pointwise("add", first, first)])
    outputs, expected, _ = K.run(spec, "rows", {**_ROWS, "lanes": 2, "apart": 0})
    assert K.error(outputs[:1], expected[:1]) < 1e-5
    np.testing.assert_array_equal(outputs[1], expected[1])


def test_window() -> None:
    outputs, expected, _ = K.run(K.max_pool(14, 24), "columns", {"vl": 16, "chunk": 8, "par": 1})
    assert K.error(outputs, expected) == 0


def test_integers_that_are_computed_from_each_other_and_read_twice() -> None:
    """As the indices of a strided max pool: 2 i, and from it 2 i + 1."""
    b = GraphBuilder()
    x, y = b.input(0, (6, 24), "float32"), b.input(1, (6, 24), "int64")
    i = b.append("iota", (), (24,), "int64", dim=0)
    even = b.pointwise("mul", i, b.const(2, "int64"))
    odd = b.pointwise("add", even, b.const(1, "int64"))
    far = b.pointwise("mul", odd, odd)
    near, next_, last = (b.broadcast(v, (6, 24)) for v in (even, odd, far))
    positive = b.pointwise("gt", x, b.broadcast(b.const(0.0, "float32"), (6, 24)))
    chosen = b.pointwise("where", positive, next_, b.pointwise("where", positive, near, y))
    other = b.broadcast(b.pointwise("sub", odd, b.const(3, "int64")), (6, 24))
    total = b.pointwise("add", chosen, last)
    spec = b.finish([b.pointwise("where", positive, total, other)])
    outputs, expected, _ = K.run(spec, "elementwise", {"chunk": 2, "par": 1, "vl": 8})
    assert (outputs[0] == expected[0]).all()


def _injective(kind: str) -> Graph:
    b = GraphBuilder()
    x, y = b.input(0, (4, 33), "float32"), b.input(1, (4, 33), "float32")
    if kind == "add":
        return b.finish([b.pointwise("add", x, y)])
    if kind == "transpose":
        return b.finish([b.pointwise("add", b.permute(x, (1, 0)), b.permute(y, (1, 0)))])
    if kind == "cat":
        return b.finish([b.append("cat", (x, y), (8, 33), "float32", dim=0)])
    if kind == "pad":
        return b.finish(
            [b.append("pad", (x,), (7, 35), "float32", lo=(1, 2), hi=(2, 0), value=3.0)]
        )
    if kind == "slice":
        return b.finish(
            [b.pointwise("add", b.slice(x, (1, 2), (2, 15), (2, 2)), b.slice(y, (0, 3), (2, 15)))]
        )
    index = b.input(2, (2, 5), "int64")
    if kind == "take":
        return b.finish([b.append("take", (x, index), (2, 5, 33), "float32", dim=0)])
    return b.finish([b.append("gather", (x, index), (2, 5), "float32", dim=1)])


@pytest.mark.parametrize("kind", ["add", "transpose", "cat", "pad", "slice", "take", "gather"])
def test_injective(kind: str) -> None:
    outputs, expected, _ = K.run(_injective(kind), "elementwise", {"vl": 16, "chunk": 2, "par": 1})
    assert K.error(outputs, expected) == 0


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (K.linear(16, 32, 8192), {"ku": 4}),
        (K.linear(13, 40, 3001), {"ku": 4, "ahead": 1}),  # neither pieces nor steps divide it
        (K.conv(512, 7, 32, 3, 1, 1), {"tm": 7, "ku": 2}),
        (K.conv(128, 8, 32, 3, 2, 1), {"tm": 4}),
    ],
    ids=["matmul", "ragged", "channels", "lines"],
)
def test_long_sums_keep_their_digits(
    spec: Graph, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of thousands in one go were off by several times what eager is off by."""
    exact = Graph.from_json(json.loads(json.dumps(spec.to_json()).replace("float32", "float64")))
    expected = K.evaluate(exact, [a.astype("float64") for a in K.inputs_for(spec)])
    errors = []
    for long in (1 << 30, contraction.LONG_SUM):
        monkeypatch.setattr(contraction, "LONG_SUM", long)
        errors.append(K.error(K.run(spec, "contraction", TILE | changes)[0], expected))
    assert errors[1] < 0.75 * errors[0]


def _resized(width: int) -> Graph:
    """Rows of a table between two others, at positions that are computed of floats."""
    b = GraphBuilder()
    x, near = b.input(0, (9, width), "float32"), b.input(1, (14,), "float32")
    at = b.pointwise("maximum", near, b.const(0.0, "float32"))
    at = b.pointwise("minimum", b.pointwise("mul", at, at), b.const(8.0, "float32"))
    first = b.append("cast", (at,), (14,), "int64")
    last = b.pointwise(
        "minimum", b.pointwise("add", first, b.const(1, "int64")), b.const(8, "int64")
    )
    part = b.pointwise("sub", at, b.append("cast", (first,), (14,), "float32"))
    low, high = (b.append("take", (x, i), (14, width), "float32", dim=0) for i in (first, last))
    wide = b.broadcast(b.reshape(part, (14, 1)), (14, width))
    step = b.pointwise("mul", b.pointwise("sub", high, low), wide)
    return b.finish([b.pointwise("add", low, step)])


@pytest.mark.parametrize("width", [32, 45])
def test_what_a_line_has_in_common_is_computed_before_it(width: int) -> None:
    decisions = {"chunk": 2, "par": 1, "vl": 8}
    text = schedule(_resized(width), "elementwise", decisions).func.script(show_meta=False)
    before, along = text.split("for o in", 1)
    assert "int64" in before
    assert "int64" not in along
    outputs, expected, _ = K.run(_resized(width), "elementwise", decisions)
    assert K.error(outputs, expected) < 1e-6


@pytest.mark.parametrize("op", ["atan", "sinh", "expm1", "round"])
def test_positions_beside_what_takes_no_vectors(op: str) -> None:
    """TVM takes a statement with such a call apart, and lost the positions of its lanes."""
    b = GraphBuilder()
    x, where = b.input(0, (4, 12, 31, 2), "float32"), b.input(1, (2,), "int64")
    taken = b.append("take", (x, where), (2, 12, 31, 2), "float32", dim=0)
    positive = b.pointwise("gt", taken, b.const(0.0, "float32"))
    spec = b.finish([b.pointwise("where", positive, b.pointwise(op, taken), taken)])
    outputs, expected, _ = K.run(spec, "elementwise", {"vl": 16, "chunk": 8, "par": 0})
    assert K.error(outputs, expected) < 1e-6


@pytest.mark.parametrize("op", ["expm1", "atan", "tanh", "erf", "sinh", "asin"])
def test_signs_of_numbers_one_after_another(op: str) -> None:
    """Rounded to bfloat16 and chosen beside the argument: of masks of bits LLVM made other bits."""
    b = GraphBuilder()
    x = b.cast(b.input(0, (7, 20), "bfloat16"), "float32")  # twelve are left of the last vector
    positive = b.pointwise("gt", x, b.const(0.0, "float32"))
    value = b.pointwise("where", positive, x, b.pointwise(op, x))
    spec = b.finish([b.cast(value, "bfloat16")])
    outputs, expected, _ = K.run(spec, "elementwise", {"vl": 16, "chunk": 8, "par": 0})
    assert np.array_equal(np.isnan(outputs[0]), np.isnan(expected[0]))
    assert K.error([np.nan_to_num(outputs[0])], [np.nan_to_num(expected[0])]) < 1e-2


def test_positions_that_are_computed_in_many_steps_take_no_longer_with_each() -> None:
    """TVM writes a whole number out wherever it is read: of these, 4**12 times."""
    b = GraphBuilder()
    x, at = b.input(0, (9, 32), "float32"), b.input(1, (14,), "int64")
    for step in range(12):
        at = b.pointwise("maximum", b.pointwise("mul", at, at), b.const(step % 3, "int64"))
        at = b.pointwise("minimum", at, b.const(8, "int64"))
    spec = b.finish([b.append("take", (x, at), (14, 32), "float32", dim=0)])
    outputs, expected, _ = K.run(spec, "elementwise", {"chunk": 2, "par": 1, "vl": 8})
    assert (outputs[0] == expected[0]).all()


def test_an_index_that_views_joined_is_taken_apart_without_divisions() -> None:
    """Heads become columns behind a product, and what is added there is one of heads again."""
    b = GraphBuilder()
    left, right = b.input(0, (3, 8, 16), "float32"), b.input(1, (3, 16, 24), "float32")
    heads = b.append("matmul", (left, right), (3, 8, 24), "float32")
    joined = b.reshape(b.permute(heads, (1, 0, 2)), (8, 72))
    other = b.permute(b.input(2, (3, 8, 24), "float32"), (1, 0, 2))
    spec = b.finish([b.pointwise("add", joined, b.reshape(other, (8, 72)))])
    decisions = {**TILE, "vl": 8, "tm": 4, "nv": 3, "pack": 0}
    text = schedule(spec, "contraction", decisions).func.script(show_meta=False)
    (read,) = {r for r in re.findall(r"in2\[[^]]*\]", text) if "v" in r}
    assert "//" not in read.split("v")[0].rsplit("*", 1)[-1]
    outputs, expected, _ = K.run(spec, "contraction", decisions)
    assert K.error(outputs, expected) < 1e-5
