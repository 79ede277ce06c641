"""Products of few rows read weights where they lie: nothing is packed, and no copy is kept."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.emitting import schedule
from tests.families import kernels as K
from torch_pruner.codegen.build.lower import compile_kernel
from torch_pruner.families import sketches_for
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch_pruner.families.space import Sketch

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

BOUNDS = {"float32": 1e-5, "float64": 1e-12, "float16": 4e-3, "bfloat16": 2e-2}


def product(
    rows: int, columns: int, depth: int, dtype: str = "float32", *, along: bool = True
) -> Graph:
    """Weights of nn.Linear, along the reduction, or of GPT-2's Conv1D; gelu and a residual."""
    b = GraphBuilder()
    x = b.input(0, (rows, depth), dtype)
    shape = (columns, depth) if along else (depth, columns)
    w = b.input(1, shape, dtype, static=True)
    bias, more = b.input(2, (columns,), dtype, static=True), b.input(3, (rows, columns), dtype)
    y = b.pointwise("add", b.matmul(x, b.permute(w, (1, 0)) if along else w), bias)
    half = b.const(0.5, dtype)
    inside = b.pointwise("add", b.pointwise("erf", b.pointwise("mul", y, half)), half)
    return b.finish([b.pointwise("add", b.pointwise("mul", y, inside), more)])


def int8(rows: int, columns: int, depth: int, *, along: bool = True) -> Graph:
    """The values of a rounded weight, scaled after the sum, and a cast."""
    b = GraphBuilder()
    x = b.input(0, (rows, depth), "bfloat16")
    q = b.input(1, (columns, depth) if along else (depth, columns), "int8", static=True)
    scale = b.input(2, (columns,), "float32", static=True)
    y = b.append("matmul", (x, b.permute(q, (1, 0)) if along else q), (rows, columns), "float32")
    return b.finish([b.cast(b.pointwise("mul", y, scale), "bfloat16")])


def keys(heads: int, shared: int, length: int, depth: int, rows: int = 1) -> Graph:
    """Queries of every head by keys that heads share, as a cache has them, with a mask."""
    b = GraphBuilder()
    q = b.input(0, (1, heads * shared, rows, depth), "float32")
    k = b.input(1, (1, heads, length, depth), "float32")
    mask = b.input(2, (length,), "float32")
    wide = b.broadcast(
        b.reshape(k, (1, heads, 1, length, depth)), (1, heads, shared, length, depth)
    )
    k = b.permute(b.reshape(wide, (1, heads * shared, length, depth)), (0, 1, 3, 2))
    return b.finish([b.pointwise("add", b.matmul(q, k), mask)])


def values(heads: int, shared: int, length: int, depth: int) -> Graph:
    """Weights of a query by values that heads share."""
    b = GraphBuilder()
    p = b.input(0, (1, heads * shared, 1, length), "float32")
    v = b.input(1, (1, heads, length, depth), "float32")
    wide = b.broadcast(
        b.reshape(v, (1, heads, 1, length, depth)), (1, heads, shared, length, depth)
    )
    return b.finish([b.matmul(p, b.reshape(wide, (1, heads * shared, length, depth)))])


def pooled(channels: int, out: int) -> Graph:
    """A convolution of one position, as squeeze and excitation has them."""
    b = GraphBuilder()
    x = b.permute(b.input(0, (3, 1, 1, channels), "float32"), (0, 3, 1, 2))
    w = b.input(1, (out, channels, 1, 1), "float32", static=True)
    none, one = (0, 0), (1, 1)
    y = b.append(
        "conv", (x, w), (3, out, 1, 1), "float32", stride=one, lo=none, hi=none, dilation=one,
        groups=1,
    )  # fmt: skip
    return b.finish([b.permute(b.pointwise("relu", y), (0, 2, 3, 1))])


def sketch_of(spec: Graph, target: TargetSpec | None = None) -> Sketch:
    found = sketches_for(Task("kernel", spec, target or TargetSpec.detect(2), 2))
    assert found[0].name in ("in_place", "axpy")
    return found[0]


def checked(spec: Graph, bound: float, count: int) -> None:
    """The draft and ``count`` points of the sketch against the reference; nothing is packed."""
    sketch = sketch_of(spec)
    for point in K.points(sketch, count):
        outputs, expected, built = K.run(spec, sketch.name, point)
        assert built.kernel.packs == (None,) * len(spec.inputs)
        assert K.error(outputs, expected) < bound, point


def shapes() -> Iterator[tuple[int, int, int, str]]:
    """Rows 1 to 8, and 16; columns and depths that fill vectors and that do not."""
    dtypes = itertools.cycle(BOUNDS)
    sizes = [(33, 41), (1, 96), (7, 5), (64, 70), (33, 300), (1, 3), (7, 1), (64, 17)]
    for rows, (columns, depth) in enumerate(sizes, 1):
        for _ in range(2):
            yield rows, columns, depth, next(dtypes)
    yield 1, 40, 5000, "float32"
    yield 1, 33, 128, "bfloat16"
    yield 8, 16, 64, "float16"
    yield 16, 40, 130, "float32"


@pytest.mark.parametrize(("rows", "columns", "depth", "dtype"), list(shapes()))
def test_along_the_reduction(rows: int, columns: int, depth: int, dtype: str) -> None:
    checked(product(rows, columns, depth, dtype), BOUNDS[dtype], 1)


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "dtype"),
    [
        (1, 64, 41, "float32"),
        (2, 48, 7, "bfloat16"),
        (3, 16, 1, "float32"),
        (4, 32, 70, "float16"),
        (5, 96, 33, "float64"),
        (8, 64, 300, "float32"),
        (1, 32, 5000, "float32"),
    ],
)
def test_row_after_row(rows: int, columns: int, depth: int, dtype: str) -> None:
    checked(product(rows, columns, depth, dtype, along=False), BOUNDS[dtype], 2)


@pytest.mark.parametrize(
    "spec",
    [
        int8(1, 96, 70),
        int8(4, 64, 128, along=False),
        keys(3, 1, 50, 64),
        keys(2, 3, 33, 20, rows=2),
        values(2, 3, 50, 64),
        pooled(40, 24),
    ],
    ids=["int8", "int8-rows", "keys", "grouped-keys", "grouped-values", "pooled"],
)
def test_other_forms(spec: Graph) -> None:
    checked(spec, 2e-2 if spec.nodes[spec.inputs[1]].dtype == "int8" else 1e-5, 3)


@pytest.mark.parametrize("along", [True, False])
def test_long_sums_are_exact(along: bool) -> None:
    """In one accumulator for each lane they would be off by some times as much."""
    b = GraphBuilder()
    x = b.input(0, (1, 16384), "float32")
    w = b.input(1, (32, 16384) if along else (16384, 32), "float32", static=True)
    spec = b.finish([b.matmul(x, b.permute(w, (1, 0)) if along else w)])
    sketch = sketch_of(spec)
    given, weight = K.inputs_for(spec)
    matrix = weight.T if along else weight
    exact = given.astype(np.float64) @ matrix.astype(np.float64)
    scale = np.abs(given).astype(np.float64) @ np.abs(matrix).astype(np.float64)
    for point in K.points(sketch, 3):
        outputs, _, _ = K.run(spec, sketch.name, point)
        assert (np.abs(outputs[0] - exact) / scale).max() < 5e-7


@pytest.mark.parametrize("along", [True, False])
@pytest.mark.parametrize("depth", [5, 21, 64])
def test_nan_and_infinity_stay_in_their_columns(along: bool, depth: int) -> None:
    """What a last vector counts twice, and leaves out, is no exception."""
    spec = product(2, 16, depth, along=along)
    arrays = K.inputs_for(spec)
    weight = arrays[1] if along else arrays[1].T
    for column, at in enumerate((0, depth // 2, depth - 1, depth - 3)):
        weight[column, at] = (np.inf, np.nan, -np.inf, np.nan)[column]
    arrays[0][1, depth - 2] = 0.0
    expected = evaluate(spec, arrays)
    sketch = sketch_of(spec)
    for point in K.points(sketch, 3):
        kernel = schedule(spec, sketch.name, point)
        out = K.aligned((2, 16), "float32")
        compile_kernel(kernel, TargetSpec.detect(2)).bind([*arrays, out])()
        np.testing.assert_allclose(out, expected[0], rtol=1e-4, atol=1e-4)


class Conv1D(torch.nn.Module):
    """GPT-2's linear layer."""

    def __init__(self, depth: int, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(depth, columns) / depth**0.5)
        self.bias = torch.nn.Parameter(torch.randn(columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


@pytest.mark.parametrize(
    "make",
    [lambda: torch.nn.Linear(768, 2304), lambda: Conv1D(768, 2304)],
    ids=["linear", "conv1d"],
)
def test_a_compiled_layer_of_one_row_keeps_no_copy(
    make: Callable[[], torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """46f522d packed every weight, whatever for."""
    from torch_pruner.dynamo.run import runtime

    calls = []
    begin = runtime.RegionCall.__init__

    def noted(self: Any, *args: Any) -> None:
        calls.append(self)
        begin(self, *args)

    monkeypatch.setattr(runtime.RegionCall, "__init__", noted)
    torch._dynamo.reset()
    model, x = make(), torch.randn(1, 768)
    options = {"strict": True, "effort": "none", "threads": 2}
    with torch.no_grad():
        result = torch.compile(model, backend="pruner", options=options)(x)
        torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-4)
    (call,) = calls
    assert call.compiled.plan.packed_bytes == 0
    assert call.packed.nbytes == 0
