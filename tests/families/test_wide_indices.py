"""Tensors of 2**31 elements and more: indices of 64 bits where extents ask for it, else of 32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import torch_pruner as tp
from tests.emitting import schedule
from torch_pruner.codegen.build.lower import compile_module, program_module
from torch_pruner.codegen.parts import kernel
from torch_pruner.families import sketches_for
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.tvm

ROWS = 2**16


def added(columns: int) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (ROWS, columns), "int8")
    return b.finish([b.pointwise("add", x, b.const(1, "int8"))])


def turned(columns: int) -> Graph:
    b = GraphBuilder()
    return b.finish([b.permute(b.input(0, (ROWS, columns), "bool"), (1, 0))])


def summed(columns: int) -> Graph:
    b = GraphBuilder()
    wide = b.cast(b.input(0, (ROWS, columns), "int8"), "int32")
    return b.finish([b.reduce("sum", wide, (1,))])


def down(columns: int) -> Graph:
    b = GraphBuilder()
    wide = b.cast(b.input(0, (ROWS, columns), "int8"), "int32")
    return b.finish([b.reduce("max", wide, (0,))])


def looked_up(columns: int) -> Graph:
    b = GraphBuilder()
    table, index = b.input(0, (ROWS, columns), "int8"), b.input(1, (3,), "int64")
    return b.finish([b.append("take", (table, index), (3, columns), "int8", dim=0)])


GRAPHS = (added, turned, summed, down, looked_up)


def compiled(spec: Graph) -> str:
    """The TIR of the draft, which TVM takes."""
    target = TargetSpec.detect(2)
    sketch = sketches_for(Task("wide", spec, target, 2))[0]
    made = schedule(spec, sketch.name, dict(sketch.named(sketch.default())))
    places = tuple(Place(i) for i in range(len(made.func.params)))
    calls = {"main": [KernelCall("kernel", places)]}
    compile_module(program_module({"kernel": made}, calls, len(places)), target)
    return str(made.func.script())


@pytest.mark.parametrize("make", GRAPHS)
def test_indices_are_as_wide_as_extents_ask_for(make: Callable[[int], Graph]) -> None:
    """An int32 literal overflowed, and eager ran the graph."""
    assert "T.int64" in compiled(make(2**15 + 64))
    if make is not looked_up:  # whose index is data of 64 bits
        assert "T.int64" not in compiled(make(2**14))


def test_wide_indices_compute_the_same_in_a_network(backend, monkeypatch) -> None:
    monkeypatch.setattr(kernel, "_LARGE", 0)
    torch._dynamo.reset()
    weight, taps = torch.randn(48, 40), torch.randn(16, 8, 3, 3)

    def fn(x, image, index):
        y = torch.softmax(x @ weight, 1)[index].t().cumsum(0)
        z = torch.nn.functional.conv2d(image, taps, padding=1).relu()
        return y, torch.nn.functional.max_pool2d(z, 2), torch.cat([z, -z], 1).sum((2, 3))

    arguments = torch.randn(33, 48), torch.randn(2, 8, 14, 14), torch.tensor([3, -1, 0])
    got = backend.compile(fn, library=False)(*arguments)
    for a, b in zip(got, fn(*arguments), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("host", [False, True])
def test_gpu_indices(host: bool) -> None:
    def text(columns: int) -> str:
        decisions = {"vl": 4, "threads": 256}
        made = schedule(added(columns), "gpu_elementwise", decisions, host=host)
        return str(made.func.script())

    assert "T.int64" in text(2**15 + 64)
    assert "T.int64" not in text(64)


@pytest.mark.stress
def test_a_real_tensor_of_more_than_two_to_the_31(backend) -> None:
    """Needs 8 GiB."""
    size = 2**31 + 64
    x = torch.from_numpy(np.resize(np.arange(251, dtype=np.uint8), size).view(np.int8))
    torch._dynamo.reset()
    function = backend.compile(lambda x: x + 1, check="off")
    with torch.no_grad():
        got = function(x)
    report = tp.last_report()
    assert report is not None
    assert report.ops_compiled == 1
    for part in range(0, size, 2**28):
        assert torch.equal(got[part : part + 2**28], x[part : part + 2**28] + 1)
