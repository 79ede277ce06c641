"""Products of backward graphs: operands that lie the other way round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from torch_pruner.compiler.drafting import draft
from torch_pruner.families import sketches_for
from torch_pruner.families.gradient.form import gradient_of
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

GRADIENT = {"vl": 16, "tm": 6, "nv": 2, "mc": 2, "lb": 1, "par": 1}


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (K.weight_gradient(16, 8, 32, 3, 1, 1), {}),
        (K.weight_gradient(20, 9, 48, 3, 1, 1), {"mc": 3}),  # part of a tile, part of a panel
        (K.weight_gradient(16, 9, 32, 3, 2, 1), {"lb": 5}),
        (K.weight_gradient(16, 8, 32, 3, 2, 1), {"lb": 8}),  # in one block: nothing waits
        (K.weight_gradient(16, 8, 32, 3, 2, 0), {"lb": 2}),  # positions that nobody reads
        (K.weight_gradient(24, 7, 16, 1, 1, 0, batch=3), {"nv": 1, "lb": 7}),
        (K.weight_gradient(12, 8, 16, 1, 2, 0), {"nv": 1, "tm": 4, "par": 0, "mc": 1}),
        (K.weight_gradient(6, 14, 64, 7, 2, 3), {"nv": 4, "tm": 3, "mc": 5}),
        (K.weight_gradient(8, 6, 32, 5, 1, 4), {"tm": 8, "mc": 1}),  # more border than input
        (K.weight_gradient(16, 12, 32, 3, 1, 1, rank=1), {"lb": 2}),
        (K.weight_gradient(6, 4, 16, 3, 1, 1, rank=3, batch=1), {"nv": 1, "lb": 4}),
        (K.weight_gradient(16, 2101, 32, 3, 1, 1, rank=1), {"lb": 2}),  # lines in pieces
        (K.weight_gradient(8, 2101, 16, 9, 1, 600, rank=1), {"nv": 1, "lb": 1}),
        (K.weight_gradient(8, 2101, 16, 5, 2, 0, rank=1), {"nv": 1, "lb": 1}),
    ],
)
def test_gradients_of_weights(spec: Graph, changes: dict[str, int]) -> None:
    outputs, expected, _ = K.run(spec, "gradient", GRADIENT | changes)
    assert K.error(outputs, expected) < 1e-5


def test_any_point_computes_the_same() -> None:
    spec = K.weight_gradient(32, 14, 64, 3, 1, 1)
    (space,) = (
        s for s in sketches_for(Task("k", spec, TargetSpec.detect(2), 2)) if s.name == "gradient"
    )
    for decisions in K.points(space, 8):
        outputs, expected, _ = K.run(spec, "gradient", decisions)
        assert K.error(outputs, expected) < 1e-5, decisions


TURNED = {
    "vl": 16, "tm": 6, "nv": 2, "mc": 1, "order": 0, "ku": 2, "pack": 1, "par": 1, "ahead": 0,
    "kb": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (K.turned(96, 64, 100), {}),
        (K.turned(37, 50, 41), {"mc": 3}),  # the last panel is packed by elements
        (K.turned(37, 90, 41), {"mc": 2, "order": 1, "ku": 4}),
        (K.turned(24, 32, 50, batch=3), {"mc": 2}),
        (K.turned(40, 64, 1536), {"kb": 3, "mc": 2, "order": 1}),
    ],
)
def test_operands_that_change_are_packed_along_their_rows(
    spec: Graph, changes: dict[str, int]
) -> None:
    outputs, expected, _ = K.run(spec, "contraction", TURNED | changes)
    assert K.error(outputs, expected) < 1e-5


OUTER = {"vl": 8, "tm": 6, "nv": 2, "mc": 2, "order": 1, "ku": 2, "par": 1, "kb": 1}


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (K.turned(96, 64, 100), {}),
        (K.turned(37, 50, 41), {"mc": 3, "nv": 3, "tm": 4}),  # part of a tile, part of a panel
        (K.turned(24, 32, 50, batch=3), {"order": 0, "ku": 4}),
        (K.turned(7, 20, 1536), {"kb": 3, "par": 0, "mc": 1}),
        (K.turned(40, 64, 50, dtype="bfloat16"), {"vl": 16}),
    ],
)
def test_sums_of_outer_products(spec: Graph, changes: dict[str, int]) -> None:
    outputs, expected, _ = K.run(spec, "outer_products", OUTER | changes)
    assert K.error(outputs, expected) < (1e-5 if spec.nodes[0].dtype == "float32" else 1e-2)


def test_an_operand_that_no_strides_describe_is_packed_too() -> None:
    """Heads of positions, turned: rows are (head, column), the sum is over (image, position)."""
    b = GraphBuilder()
    x, y = b.input(0, (2, 3, 8, 5), "float32"), b.input(1, (16, 20), "float32")
    turned = b.reshape(b.permute(x, (1, 3, 0, 2)), (15, 16))
    spec = b.finish([b.matmul(turned, y)])
    outputs, expected, _ = K.run(spec, "outer_products", OUTER | {"tm": 4})
    assert K.error(outputs, expected) < 1e-5


FILTERED = {"vl": 8, "tm": 4, "nv": 2, "tb": 8, "cs": 2, "ns": 1, "ku": 2, "par": 1}


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (K.weight_gradient(16, 8, 32, 3, 1, 1), {}),
        (K.weight_gradient(16, 8, 32, 3, 1, 1), {"tb": 32, "cs": 1, "ns": 2}),  # in one block
        (K.weight_gradient(16, 9, 32, 3, 1, 1), {"tb": 10, "nv": 4, "tm": 8}),  # half tiles
        (K.weight_gradient(16, 9, 32, 3, 1, 0), {"tb": 16, "tm": 1}),
        (K.weight_gradient(16, 7, 24, 3, 1, 2), {"tb": 5, "ku": 1, "nv": 3}),
        (
            K.weight_gradient(8, 12, 24, 3, 1, 1, rank=1),
            {"tb": 6, "cs": 1, "nv": 3, "par": 0},
        ),
    ],
)
def test_gradients_by_minimal_filtering(spec: Graph, changes: dict[str, int]) -> None:
    outputs, expected, _ = K.run(spec, "filtered_gradient", FILTERED | changes)
    assert K.error(outputs, expected) < 1e-6


def test_gradients_by_minimal_filtering_lose_few_digits() -> None:
    """Against float64, beside sums that begin anew at every line; eager's are off by more."""
    spec = K.weight_gradient(16, 40, 16, 3, 1, 1)
    arrays = [a.astype(np.float64) for a in K.inputs_for(spec)]
    x, grad = np.pad(arrays[0], ((0, 0), (1, 1), (1, 1), (0, 0))), arrays[1]
    exact = np.stack(
        [
            np.einsum("nhwc,nhwo->oc", x[:, i : i + 40, j : j + 40], grad)
            for i in range(3)
            for j in range(3)
        ],
        axis=-1,
    ).reshape(16, 16, 3, 3)
    error = {}
    filtered = FILTERED | {"tb": 200, "cs": 1, "par": 0}
    for sketch, decisions in (("filtered_gradient", filtered), ("gradient", GRADIENT | {"nv": 1})):
        (output,), _, _ = K.run(spec, sketch, decisions)
        error[sketch] = np.abs(output - exact).max()
    assert error["filtered_gradient"] <= 4 * error["gradient"]


def test_a_draft_reads_channels_last_operands_in_place() -> None:
    target = TargetSpec.detect(2)
    task = Task("k", K.weight_gradient(64, 56, 64, 5, 1, 2, batch=4), target, 2)
    found = draft(task)
    assert found.sketch == "gradient"
    takes = schedule(task.spec, found.sketch, dict(found.decisions))
    assert len(takes.scratch) <= 1  # sums; no operand is copied


def test_other_convolutions_are_no_gradients() -> None:
    assert gradient_of(K.conv(16, 8, 32, 3, 1, 1)) is None
    assert gradient_of(K.conv_transpose(16, 4, 32, 3, 1, 1)) is None
    assert gradient_of(K.turned(16, 16, 16)) is None
