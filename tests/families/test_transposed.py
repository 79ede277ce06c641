"""Elementwise kernels that turn what they read across: ragged squares, lines across short axes,
dtypes, results written over operands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from tests.unit.tuner import graphs_by_kind as G
from torch_pruner.codegen.build.lower import compile_kernel
from torch_pruner.families import named, sketches_for
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

TARGET = TargetSpec.from_dict({"kind": "llvm", "mcpu": "znver4"}, 2)


def several() -> Graph:
    """A value that lies across in two ways, and the same input as it lies."""
    b = GraphBuilder()
    x = b.input(0, (40, 40), "float32")
    y = b.input(1, (40, 40), "float32")
    sums = b.pointwise("add", b.permute(x, (1, 0)), b.pointwise("mul", x, b.permute(y, (1, 0))))
    return b.finish([b.pointwise("exp", sums), b.permute(y, (1, 0))])


def beside_a_gather() -> Graph:
    """Rows picked by positions, beside what lies across."""
    b = GraphBuilder()
    x = b.input(0, (34, 21), "float32")
    table, rows = b.input(1, (5, 34), "float32"), b.input(2, (21,), "int64")
    picked = b.append("take", (table, rows), (21, 34), "float32", dim=0)
    return b.finish([b.pointwise("sub", b.permute(x, (1, 0)), picked)])


def broadcast() -> Graph:
    """Padding, a row and a column beside what lies across, under a slice and a reshape."""
    b = GraphBuilder()
    x = b.input(0, (3, 60, 4, 16), "float32")
    row, column = b.input(1, (50,), "float32"), b.input(2, (4, 16, 1), "float32")
    near = b.input(3, (3, 4, 16, 48), "float32")
    cut = b.slice(x, (0, 5, 0, 0), (3, 50, 4, 16))
    turned = b.permute(cut, (0, 2, 3, 1))
    wide = b.append(
        "pad", (near,), (3, 4, 16, 50), "float32", lo=(0, 0, 0, 1), hi=(0, 0, 0, 1), value=2.0
    )
    shape = b.shape(turned)
    sums = b.pointwise("mul", turned, b.broadcast(row, shape))
    sums = b.pointwise("add", sums, b.broadcast(column, shape))
    return b.finish([b.pointwise("maximum", sums, wide)])


SPECS = {
    "whole": G.crossed((32, 48), (1, 0)),
    "ragged": G.crossed((33, 47), (1, 0)),
    "just one square": G.crossed((16, 16), (1, 0)),
    "batches": G.crossed((3, 20, 37), (0, 2, 1)),
    "channels first": G.crossed((2, 7, 7, 40), (0, 3, 1, 2)),
    "channels last": G.crossed((2, 40, 9, 5), (0, 2, 3, 1)),
    "an axis between": G.crossed((20, 3, 35), (2, 1, 0)),
    "outer axes": G.crossed((18, 2, 3, 21), (1, 3, 2, 0)),
    "computed later": G.crossed((33, 20), (1, 0), after=True),
    "float64": G.crossed((19, 33), (1, 0), "float64"),
    "bfloat16": G.crossed((35, 33), (1, 0), "bfloat16"),
    "int64": G.crossed((19, 33), (1, 0), "int64"),
    "several": several(),
    "gather": beside_a_gather(),
    "broadcast": broadcast(),
}


@pytest.mark.parametrize("name", SPECS)
def test_results_are_those_of_the_reference(name: str) -> None:
    spec = SPECS[name]
    sketch = _sketch(spec)
    for point in K.points(sketch, 6):
        outputs, expected, _ = K.run(spec, "transposed", point)
        for made, want in zip(outputs, expected, strict=True):
            assert made.shape == want.shape
        limit = 1e-2 if spec.nodes[0].dtype == "bfloat16" else 1e-6
        assert K.error(outputs, expected) < limit


def _sketch(spec: Graph):
    return next(s for s in sketches_for(Task("t", spec, TARGET, 2)) if s.name == "transposed")


@pytest.mark.parametrize(
    "spec",
    [
        G.pointwise(),
        G.crossed((40, 6), (1, 0)),  # no square of six
        G.crossed((40, 3, 5), (1, 2, 0)),  # nor of three fives
        G.crossed((40, 3, 30), (1, 0, 2)),  # lines stay lines
        G.crossed((40, 40), (1, 0), "int8"),
    ],
)
def test_what_has_no_squares_is_left_to_sweeps(spec: Graph) -> None:
    assert [s.name for s in sketches_for(Task("t", spec, TARGET, 2))] == ["elementwise"]


@pytest.mark.parametrize("shape", [(33, 47), (64, 20), (18, 16)])
def test_a_result_may_be_written_over_what_is_read_where_it_lies(shape: tuple[int, int]) -> None:
    assert named("transposed").one_pass
    b = GraphBuilder()
    x, y = b.input(0, shape, "float32"), b.input(1, shape[::-1], "float32")
    doubled = b.pointwise("add", b.permute(x, (1, 0)), b.pointwise("add", y, y))
    spec = b.finish([doubled])
    arrays = K.inputs_for(spec)
    expected = arrays[0].T + 2 * arrays[1]
    for point in K.points(_sketch(spec), 4):
        kernel = schedule(spec, "transposed", point)
        _, over = given = K.inputs_for(spec)
        compile_kernel(kernel, TargetSpec.detect(2)).bind([*given, over])()
        np.testing.assert_array_equal(over, expected)
