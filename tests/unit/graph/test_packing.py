"""Packed operands against explicit loops, for every form and blocks that columns do not fill."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from tests.emitting import signature
from torch_pruner.families.contraction.form import ContractionDecisions
from torch_pruner.graph.contraction import contraction_of
from torch_pruner.graph.ir import Graph, GraphBuilder, Node
from torch_pruner.graph.packing import PackLayout, strided_layout, to_gkn


def _element(operand: np.ndarray, form: str, groups: int, g: int, k: int, n: int) -> float:
    """Element (g, k, n) of a contraction's second operand, as the operators of the IR define it."""
    if form == "matmul":
        return operand.reshape(-1, *operand.shape[-2:])[g, k, n]
    spatial = operand.shape[2:]
    if form == "depthwise":
        return operand[n, 0][np.unravel_index(k, spatial)]
    if form == "conv":
        *offset, channel = np.unravel_index(k, (*spatial, operand.shape[1]))
        return operand[(g * (operand.shape[0] // groups) + n, channel, *offset)]
    per_group = operand.shape[0] // groups
    *offset, channel = np.unravel_index(k, (*spatial, per_group))
    flipped = tuple(r - 1 - o for r, o in zip(spatial, offset, strict=True))
    return operand[(g * per_group + channel, n, *flipped)]


_FORMS = {
    "matmul": [((5, 7), 1, 5, 7), ((2, 3, 4, 6), 6, 4, 6)],
    "conv": [((6, 3, 2, 3), 1, 18, 6), ((6, 2, 3), 3, 6, 2), ((4, 1, 1, 1), 2, 1, 2)],
    "depthwise": [((7, 1, 3, 2), 1, 6, 7), ((5, 1, 4), 1, 4, 5)],
    "conv_transpose": [((3, 5, 2, 2), 1, 12, 5), ((4, 3, 3), 2, 6, 3)],
}


@pytest.mark.parametrize("block", [1, 3, 4, 16])
@pytest.mark.parametrize(
    ("form", "shape", "groups", "depth", "columns"),
    [(form, *case) for form, cases in _FORMS.items() for case in cases],
)
def test_pack_is_the_loop(form, shape, groups, depth, columns, block) -> None:
    b = GraphBuilder()
    view = b.finish([b.input(0, shape, "float32")])
    blocks = -(-columns // block)
    layout = PackLayout(view, form, groups, block, (groups, blocks, depth, block))
    operand = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    packed = layout.pack(operand)
    assert packed.shape == layout.shape
    for g, o, k, v in itertools.product(*(range(d) for d in layout.shape)):
        n = o * block + v
        expected = _element(operand, form, groups, g, k, n) if n < columns else 0
        assert packed[g, o, k, v] == expected, (g, o, k, v)


@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize(("depth", "rows"), [(6, 3), (5, 3), (5, 16), (1, 1)])
def test_pairs_lie_together_and_zeros_complete_them(depth: int, rows: int, block: int) -> None:
    """``rows`` pairs hold a reduction of ``depth``, odd and padded to whole steps alike."""
    groups, columns = 2, 7
    b = GraphBuilder()
    view = b.finish([b.input(0, (groups, depth, columns), "float32")])
    blocks = -(-columns // block)
    layout = PackLayout(view, "matmul", groups, block, (groups, blocks, rows, block * 2), 2)
    operand = np.arange(1, groups * depth * columns + 1, dtype=np.float32)
    operand = operand.reshape(groups, depth, columns)
    packed = layout.pack(operand)
    assert packed.shape == layout.shape
    assert packed.flags.c_contiguous
    for g, o, r, v in itertools.product(range(groups), range(blocks), range(rows), range(block)):
        for half in (0, 1):
            k, n = 2 * r + half, o * block + v
            expected = operand[g, k, n] if k < depth and n < columns else 0
            assert packed[g, o, r, 2 * v + half] == expected, (g, o, r, v, half)
    assert PackLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_views_are_applied_before_packing() -> None:
    b = GraphBuilder()
    view = b.finish([b.permute(b.input(0, (3, 2), "float32"), (1, 0))])
    layout = PackLayout(view, "matmul", 1, 2, (1, 2, 2, 2))
    packed = layout.pack(np.array([[1, 2], [3, 4], [5, 6]], np.float32))
    assert packed.tolist() == [[[[1, 3], [2, 4]], [[5, 0], [6, 0]]]]


@pytest.mark.parametrize("dtype", ["float64", "int8", "bool", "bfloat16"])
def test_the_element_type_is_kept(dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    b = GraphBuilder()
    layout = PackLayout(b.finish([b.input(0, (2, 3), dtype)]), "matmul", 1, 4, (1, 1, 2, 4))
    packed = layout.pack(np.ones((2, 3), kind))
    assert packed.dtype == kind
    assert packed.astype(np.float64).sum() == 6


def test_layouts_survive_json() -> None:
    b = GraphBuilder()
    view = b.finish([b.permute(b.input(0, (3, 2), "float32"), (1, 0))])
    layout = PackLayout(view, "matmul", 1, 2, (1, 2, 2, 2))
    again = PackLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout
    assert hash(again) == hash(layout), "slots are keyed by layouts"


def test_unknown_form() -> None:
    with pytest.raises(ValueError, match="unknown operand form 'dense'"):
        to_gkn(np.zeros((2, 2)), "dense", 1)


def _conv(groups: int, *, op: str = "conv", static: bool = True) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (1, 6, 8, 8), "float32")
    out = 6 // groups if op == "conv_transpose" else 6
    inner = 6 if op == "conv_transpose" else 6 // groups
    shape = (inner, out, 3, 3) if op == "conv_transpose" else (out, inner, 3, 3)
    w = b.input(1, shape, "float32", static=static)
    common = {"stride": (1, 1), "lo": (1, 1), "dilation": (1, 1), "groups": groups}
    if op == "conv":
        common["hi"] = (1, 1)
    return b.finish([b.append(op, (x, w), (1, 6, 8, 8), "float32", **common)])


@pytest.mark.parametrize(
    ("spec", "form", "shape"),
    [
        (_conv(1), "conv", (1, 2, 54, 4)),
        (_conv(2), "conv", (2, 1, 27, 4)),
        (_conv(6), "depthwise", (1, 2, 9, 4)),
        (_conv(2, op="conv_transpose"), "conv_transpose", (2, 1, 27, 4)),
    ],
    ids=["conv", "grouped", "depthwise", "transposed"],
)
def test_signatures_name_the_form(spec: Graph, form: str, shape: tuple[int, ...]) -> None:
    decisions = dict.fromkeys(ContractionDecisions._fields, 1) | {"vl": 4}
    takes = signature(spec, "contraction", decisions)
    pack = takes.packs[1]
    assert takes.packs[0] is None
    assert pack is not None
    assert (pack.form, pack.shape) == (form, shape)
    assert takes.inputs[1].shape == shape
    con = contraction_of(spec)
    assert (con.groups, con.depth) == (shape[0], shape[2])


def test_a_copy_can_be_made_in_memory_that_is_given() -> None:
    """Every element is written, padding of columns and of the reduction included."""
    builder = GraphBuilder()
    view = builder.finish([builder.input(0, (5, 7), "float32")])
    operand = np.arange(1, 36, dtype=np.float32).reshape(5, 7)
    for shape, pair in (((1, 2, 5, 4), 1), ((1, 2, 3, 8), 2)):
        layout = PackLayout(view, "matmul", 1, 4, shape, pair)
        out = np.full(shape, np.nan, np.float32)
        assert layout.pack(operand, out) is out
        assert layout.nbytes == out.nbytes
        np.testing.assert_array_equal(out, layout.pack(operand))
        panels = out.reshape(1, 2, shape[2], 4, pair)
        for k in range(shape[2] * pair):
            for n in range(8):
                expected = operand[k, n] if k < 5 and n < 7 else 0
                assert panels[0, n // 4, k // pair, n % 4, k % pair] == expected


def strided_input() -> Node:
    b = GraphBuilder()
    return b.finish([b.input(0, (4, 6, 1), "float32")]).nodes[0]


def test_a_layout_by_strides_is_the_input_read_in_that_order() -> None:
    """Panels of two rows, in which a column's elements lie together."""
    axes = [(2, 12), (1, 0), (3, 2), (2, 6), (2, 1)]
    layout = strided_layout(strided_input(), axes)
    operand = np.arange(24, dtype=np.float32).reshape(4, 6, 1)
    expected = [12 * a + 2 * b + 6 * c + d for a, b, c, d in np.ndindex(2, 3, 2, 2)]
    assert layout.pack(operand).ravel().tolist() == expected
    assert layout.nbytes == operand.nbytes
    assert PackLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize(
    "axes", [[(4, 6), (5, 1)], [(4, 6), (6, 1), (2, 24)], [(4, 5), (6, 1)], [(24, 2)], []]
)
def test_axes_that_do_not_meet_each_element_once_are_no_layout(axes) -> None:
    with pytest.raises(ValueError, match="no layout"):
        strided_layout(strided_input(), axes)
