"""Signatures: which scratch and which packed inputs a schedule takes."""

from __future__ import annotations

import pytest

from tests.emitting import signature
from torch_pruner.families.rows.form import RowsDecisions, row_tasks
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.signature import BufferSpec

_DECISIONS = {
    "vl": 4, "tm": 5, "nv": 2, "mc": 1, "order": 0, "ku": 1, "pack": 1, "par": 0, "ahead": 0,
    "kb": 1,
}  # fmt: skip


def product(*, static: bool, twice: bool = False, columns: int = 12) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (5, 6), "float32")
    w = b.input(1, (6, columns), "bfloat16", static=static)
    y = b.matmul(b.cast(x, "bfloat16"), w)
    if twice:  # the epilogue reads the operand as well
        y = b.pointwise("add", y, b.broadcast(b.slice(w, (0, 0), (1, columns)), (5, columns)))
    return b.finish([y])


def test_a_constant_operand_arrives_packed() -> None:
    takes = signature(product(static=True), "contraction", _DECISIONS)
    assert takes.scratch == ()
    assert takes.packs[1] is not None
    assert takes.inputs[1] == BufferSpec((1, 2, 6, 8), "bfloat16")


@pytest.mark.parametrize(("static", "twice"), [(False, False), (True, True)])
def test_other_operands_are_packed_in_scratch(static: bool, twice: bool) -> None:
    takes = signature(product(static=static, twice=twice), "contraction", _DECISIONS)
    assert takes.packs == (None, None)
    assert takes.scratch == (BufferSpec((1, 2, 6, 8), "bfloat16"),)


def test_reading_in_place_needs_whole_panels() -> None:
    direct = {**_DECISIONS, "pack": 0}
    whole, ragged = product(static=False, columns=16), product(static=False, columns=12)
    assert signature(whole, "contraction", direct).scratch == ()
    assert len(signature(ragged, "contraction", direct).scratch) == 1


def test_where_tiles_are_many_narrow_operands_are_copied_wide() -> None:
    many = {**_DECISIONS, "tm": 1}
    takes = signature(product(static=True), "contraction", many)
    assert takes.inputs[1].dtype == "bfloat16"  # its panel is converted block by block
    assert takes.scratch == (BufferSpec((1, 5, 6), "float32"),)
    takes = signature(product(static=False), "contraction", many)
    panel, rows = BufferSpec((1, 2, 6, 8), "float32"), BufferSpec((1, 5, 6), "float32")
    assert takes.scratch == (panel, rows)


@pytest.mark.parametrize(("lo", "copies"), [(0, 0), (1, 1)])
def test_padded_convolutions_copy_their_input(lo: int, copies: int) -> None:
    b = GraphBuilder()
    x, w = b.input(0, (2, 3, 8), "float32"), b.input(1, (4, 3, 3), "float32", static=True)
    y = b.append(
        "conv", (x, w), (2, 4, 6 + 2 * lo), "float32", stride=(1,), lo=(lo,), hi=(lo,),
        dilation=(1,), groups=1,
    )  # fmt: skip
    takes = signature(b.finish([y]), "contraction", _DECISIONS)
    assert takes.scratch == (BufferSpec((2, 10, 3), "float32"),) * copies


def test_rows_keep_what_is_read_again() -> None:
    b = GraphBuilder()
    x = b.input(0, (6, 8), "float32")
    e = b.pointwise("exp", x)
    spec = b.finish([b.pointwise("div", e, b.reduce("sum", e, (1,), keepdim=True))])
    parallel = {"vl": 4, "lanes": 1, "chunk": 4, "par": 1, "apart": 0}
    assert row_tasks(spec, RowsDecisions(**parallel)) == (4, 2)
    assert signature(spec, "rows", parallel).scratch == (BufferSpec((2, 8), "float32"),)
    serial = {**parallel, "par": 0}
    assert row_tasks(spec, RowsDecisions(**serial)) == (6, 1)
    assert signature(spec, "rows", serial).scratch == (BufferSpec((1, 8), "float32"),)


def test_sweeps_take_inputs_and_outputs_only() -> None:
    b = GraphBuilder()
    x = b.input(0, (6, 8), "float32")
    decisions = {"vl": 4, "chunk": 12, "par": 0}
    takes = signature(b.finish([b.pointwise("exp", x)]), "elementwise", decisions)
    assert takes.inputs == takes.outputs == (BufferSpec((6, 8), "float32"),)
    assert takes.scratch == ()
    assert takes.outputs[0].nbytes == 192


def test_what_metaschedule_laid_out_anew_arrives_packed() -> None:
    layout = {"in1_extent0": 3, "in1_stride0": 4, "in1_extent1": 6, "in1_stride1": 12}
    layout |= {"in1_extent2": 4, "in1_stride2": 1}
    takes = signature(product(static=True), "metaschedule", layout)
    assert takes.packs[0] is None
    assert takes.packs[1] is not None
    assert takes.packs[1].nbytes == 6 * 12 * 2
    assert signature(product(static=True), "metaschedule", {}).packs == (None, None)
