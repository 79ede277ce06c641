"""Products of bytes: exact sums, by whichever instruction sums neighbours along the reduction."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from tests.families.test_isa import assembly
from torch_pruner.families import sketches_for
from torch_pruner.families.int8_products.space import Int8ProductsSketch
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

pytestmark = pytest.mark.tvm


def product(rows: int, columns: int, depth: int, first: str) -> Graph:
    """With an epilogue, and the second operand along the reduction, as a linear layer has it."""
    b = GraphBuilder()
    x, w = b.input(0, (rows, depth), first), b.input(1, (columns, depth), "int8", static=True)
    total = b.append("matmul", (x, b.permute(w, (1, 0))), (rows, columns), "int32")
    return b.finish([b.pointwise("add", total, b.const(3, "int32"))])


@pytest.fixture(autouse=True)
def all_bytes(monkeypatch):
    """Bytes of all values, the extremes side by side."""

    def inputs(spec: Graph, seed: int = 0) -> list[K.Array]:
        random = np.random.default_rng(seed)
        arrays = []
        for i in spec.inputs:
            node = spec.nodes[i]
            limits = np.iinfo(node.dtype)
            array = K.aligned(node.shape, node.dtype)
            array[...] = random.integers(limits.min, limits.max, node.shape, endpoint=True)
            array[0] = limits.min if i else limits.max
            arrays.append(array)
        return arrays

    monkeypatch.setattr(K, "inputs_for", inputs)


@pytest.mark.parametrize("first", ["int8", "uint8"])
@pytest.mark.parametrize("quads", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 128, 64), (1, 33, 67), (5, 65, 130), (17, 48, 15), (40, 80, 96)]
)
def test_sums_are_exact(shape: tuple[int, int, int], quads: bool, first: str) -> None:
    here = TargetSpec.detect(2)
    if not here.is_x86 or (quads and not here.byte_dot):
        pytest.skip("no such instruction here")
    spec = product(*shape, first)
    task = Task("bytes", spec, replace(here, byte_dot=quads), 2)
    assert [s.name for s in sketches_for(task)] == ["int8_products", "contraction"]
    for decisions in K.points(Int8ProductsSketch(task), 3):
        assert decisions["word"] == (4 if quads else 2)
        (got,), (want,), _ = K.run(spec, "int8_products", decisions)
        np.testing.assert_array_equal(got, want)


def test_only_constant_bytes_are_packed() -> None:
    b = GraphBuilder()
    x, w = b.input(0, (4, 64), "int8"), b.input(1, (64, 32), "int8")
    spec = b.finish([b.append("matmul", (x, w), (4, 32), "int32")])
    names = [s.name for s in sketches_for(Task("bytes", spec, TargetSpec.detect(2), 2))]
    assert "int8_products" not in names


def test_aarch64_multiplies_bytes() -> None:
    """Its code is only looked at."""
    neon = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+dotprod"]}
    target = TargetSpec.from_dict(neon, 2)
    assert target.byte_dot
    for first in ("int8", "uint8"):
        task = Task("bytes", product(5, 65, 130, first), target, 2)
        sketch = sketches_for(task)[0]
        assert sketch.name == "int8_products"
        kernel = schedule(task.spec, sketch.name, sketch.named(sketch.default()))
        assert re.search(r"\bsdot\s+v", assembly(kernel, target))
    assert not TargetSpec.from_dict({"kind": "llvm", "mtriple": "aarch64-linux-gnu"}, 2).byte_dot
