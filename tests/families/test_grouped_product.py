"""Rows in groups: emitted kernels against the reference, the reference against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.families import kernels as K
from tests.unit.tuner import graphs_by_kind as G
from torch_pruner.families.grouped_product.space import GroupedProductSketch
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task
from torch_pruner.tuner.measure.check import random_inputs

pytestmark = pytest.mark.tvm

CASES: list[dict[str, Any]] = [
    {},
    {"along_k": False},
    {"rows": 1, "groups": 1, "columns": 17},
    {"rows": 2, "groups": 8, "depth": 96, "columns": 50},
    {"rows": 40, "depth": 1100, "columns": 33},
    {"rows": 40, "depth": 1100, "columns": 48, "along_k": False},
    {"rows": 7, "depth": 5, "columns": 3, "along_k": False},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "rows": 70, "depth": 320},
    {"dtype": "bfloat16", "along_k": False},
    {"dtype": "float16", "rows": 9},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_kernels(sizes: dict[str, Any]) -> None:
    spec = G.grouped(**sizes)
    sketch = GroupedProductSketch(Task("grouped", spec, TargetSpec.detect(2), 2))
    allowed = {"bfloat16": 1e-2, "float16": 2e-3}.get(sizes.get("dtype", ""), 1e-5)
    for decisions in K.points(sketch, 3):
        outputs, expected, _ = K.run(
            spec, "grouped_product", decisions, inputs=random_inputs(spec, 1)
        )
        assert K.error(outputs, expected) < allowed, decisions


@pytest.mark.parametrize(
    "ends", [(0, 0, 24), (24, 24, 24), (0, 0, 0), (5, 5, 9), (-3, 8, 99)], ids=str
)
def test_groups_without_rows_and_rows_without_a_group(ends: tuple[int, ...]) -> None:
    spec = G.grouped()
    x, matrices, given = random_inputs(spec, 0)
    given[...] = ends
    sketch = GroupedProductSketch(Task("grouped", spec, TargetSpec.detect(2), 2))
    decisions = dict(sketch.named(sketch.default()))
    outputs, expected, _ = K.run(spec, "grouped_product", decisions, inputs=[x, matrices, given])
    assert K.error(outputs, expected) < 1e-5
    last = min(max(ends[-1], 0), 24)
    assert not np.asarray(outputs[0])[last:].any()


def test_the_reference_is_torch() -> None:
    spec = G.grouped(along_k=False)
    x, matrices, ends = random_inputs(spec, 0)
    (found,) = evaluate(spec, [x, matrices, ends])
    theirs = torch.nn.functional.grouped_mm(
        *map(torch.tensor, (x, matrices)), offs=torch.tensor(ends)
    )
    np.testing.assert_allclose(found, theirs, rtol=1e-4, atol=1e-5)
