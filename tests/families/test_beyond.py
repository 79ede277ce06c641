"""Kernels that leave out what lies behind a size that is known at run time only.

Memory is filled with NaN: what is left out shows if anything reads it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from tests.families.test_turns import planned
from tests.unit.graph.random_graphs import assert_close
from tests.unit.graph.random_graphs import inputs_for as halves
from torch_pruner.codegen.build.load import set_threads
from torch_pruner.codegen.build.lower import aligned, compile_kernel
from torch_pruner.compiler.drafting import draft
from torch_pruner.families import sketches_for
from torch_pruner.graph.bucket import bucketed
from torch_pruner.graph.extents import Bound, bounded
from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, Task

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

FILL = 7.0


def layer(batch: int, length: int, *, causal: bool = False) -> Graph:
    """A transformer's layer of two heads."""
    b, count = GraphBuilder(), iter(range(99))
    hidden, heads, width = 32, 2, 16
    x = b.input(next(count), (batch, length, hidden), "float32")

    def linear(y: int, n: int) -> int:
        w = b.input(next(count), (n, b.shape(y)[-1]), "float32", static=True)
        flat = b.reshape(y, (batch * length, b.shape(y)[-1]))
        return b.reshape(b.matmul(flat, b.permute(w, (1, 0))), (batch, length, n))

    def norm(y: int) -> int:
        total = b.reduce("sum", b.pointwise("mul", y, y), [2], keepdim=True)
        mean = b.pointwise("mul", total, b.const(1 / hidden, "float32"))
        return b.pointwise("div", y, b.pointwise("sqrt", b.pointwise("add", mean, one)))

    def head(y: int) -> int:
        return b.permute(b.reshape(y, (batch, length, heads, width)), (0, 2, 1, 3))

    one = b.const(1.0, "float32")
    q, k, v = (head(linear(norm(x), hidden)) for _ in range(3))
    scores = b.matmul(q, b.permute(k, (0, 1, 3, 2)))
    if causal:
        key, query = (b.append("iota", (), (length, length), "int64", dim=d) for d in (1, 0))
        seen = b.broadcast(b.pointwise("le", key, query), b.shape(scores))
        scores = b.pointwise("where", seen, scores, b.const(-math.inf, "float32"))
    top = b.reduce("max", scores, (3,), keepdim=True)
    powers = b.pointwise("exp", b.pointwise("sub", scores, top))
    weights = b.pointwise("div", powers, b.reduce("sum", powers, (3,), keepdim=True))
    mixed = b.permute(b.matmul(weights, v), (0, 2, 1, 3))
    x = b.pointwise("add", x, linear(b.reshape(mixed, (batch, length, hidden)), hidden))
    wide = b.pointwise("relu", linear(norm(x), 64))
    x = b.pointwise("add", x, linear(wide, hidden))
    return b.finish([norm(x), b.reduce("sum", x, (1,))])


def images(batch: int, height: int, width: int) -> Graph:
    """A network of convolutions: strides, pools, depthwise, minimal filtering, a residual."""
    b, count = GraphBuilder(), iter(range(99))
    x = b.input(next(count), (batch, 3, height, width), "float32")

    def slid(y: int, taps: int, stride: int, pad: int) -> tuple[list[int], dict[str, tuple]]:
        sizes = [(n + 2 * pad - taps) // stride + 1 for n in b.shape(y)[2:]]
        ends = {"stride": stride, "lo": pad, "hi": pad, "dilation": 1}
        return sizes, {name: (value, value) for name, value in ends.items()}

    def conv(y: int, n: int, taps: int = 1, stride: int = 1, groups: int = 1) -> int:
        sizes, attrs = slid(y, taps, stride, taps // 2)
        w = b.input(next(count), (n, b.shape(y)[1] // groups, taps, taps), "float32", static=True)
        return b.append("conv", (y, w), (batch, n, *sizes), "float32", groups=groups, **attrs)

    def pool(op: str, y: int, taps: int, stride: int) -> int:
        sizes, attrs = slid(y, taps, stride, taps // 2)
        attrs["hi"] = tuple(
            max(0, (n - 1) * stride + taps - taps // 2 - m)
            for n, m in zip(sizes, b.shape(y)[2:], strict=True)
        )
        shape = (*b.shape(y)[:2], *sizes)
        return b.append(op, (y,), shape, "float32", kernel=(taps, taps), **attrs)

    x = pool("window_max", b.pointwise("relu", conv(x, 16, 5, 2)), 3, 2)
    y = b.pointwise("relu", conv(conv(x, 16), 16, 3))
    x = b.pointwise("relu", b.pointwise("add", conv(y, 32), conv(x, 32)))
    y = b.pointwise("tanh", conv(x, 32, 3, groups=32))
    x = b.pointwise("add", conv(conv(y, 32), 32, 3, 2), conv(x, 32, 1, 2))
    area = float(b.shape(x)[2] * b.shape(x)[3])
    mean = b.pointwise("div", b.reduce("sum", x, (2, 3)), b.const(area, "float32"))
    return b.finish([mean, pool("window_sum", x, 3, 1)])


def anyhow(rng: np.random.Generator, task: Task) -> Candidate:
    sketches = [s for s in sketches_for(task) if s.name != "metaschedule"]
    chosen = K.points(sketches[rng.integers(len(sketches))], 8)
    sketch = next(s for s in sketches if set(s.names) == set(chosen[0]))
    return Candidate(sketch.name, tuple(sorted(chosen[rng.integers(len(chosen))].items())))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("small", [(1, 23), (1, 2), (3, 23), (2, 50), (1, 50)])
def test_a_layer_at_smaller_sizes(small: tuple[int, int], causal: bool) -> None:
    batches = 1 if small[0] == 1 else 3
    large, wanted = layer(batches, 50, causal=causal), layer(*small, causal=causal)
    rng = np.random.default_rng(0)
    _agree(large, wanted, [draft, partial(anyhow, rng), partial(anyhow, rng)])


def _agree(large: Graph, wanted: Graph, ways: list[Callable[[Task], Candidate]]) -> None:
    """What kernels for both make of inputs of the smaller one, beside NaN, is what it says."""
    bucket = bucketed(large, wanted)
    given = halves(wanted)
    expected = evaluate(wanted, given)
    whole = [
        np.pad(
            a.astype(np.float32),
            [(0, n - m) for n, m in zip(large.nodes[i].shape, a.shape, strict=True)],
            constant_values=np.nan,
        )
        for i, a in zip(large.inputs, given, strict=True)
    ]
    arrays = [*whole, *(np.array(n, np.int32) for _, n in bucket.counts)]
    for choose in ways:
        _, run = planned(bucket.graph, 2, choose, arrays)
        for threads in (1, 2):
            set_threads(threads)
            try:
                for made, want in zip(run(), expected, strict=True):
                    assert_close([made[tuple(map(slice, want.shape))]], [want], 1e-4)
            finally:
                set_threads(2)


@pytest.mark.parametrize("small", [(2, 33, 40), (1, 21, 18)])
def test_images_that_are_smaller(small: tuple[int, int, int]) -> None:
    large, wanted = images(3, 47, 40), images(*small)
    _agree(large, wanted, [draft, partial(anyhow, np.random.default_rng(1))])


def product(*, batch: int = 1) -> Graph:
    """Rows of a linear layer, of each of ``batch`` lists of 64 some count."""
    b = GraphBuilder()
    x = b.input(0, (batch * 64, 40), "float32")
    w = b.input(1, (48, 40), "float32", static=True)
    count = b.input(2, (), "int32", counts=True)
    y = b.pointwise("relu", b.matmul(x, b.permute(w, (1, 0))))
    return b.finish([bounded(b, y, {Bound(48, 64, count)})])


def norm() -> Graph:
    b = GraphBuilder()
    x, count = b.input(0, (3, 64, 40), "float32"), b.input(1, (), "int32")
    y = b.pointwise("sub", x, b.reduce("max", x, (2,), keepdim=True))
    return b.finish([bounded(b, y, {Bound(40, 64, count)})])


def leading_norm() -> Graph:
    """Of two rows in a position of a list some positions count: the first so many rows."""
    b = GraphBuilder()
    x, count = b.input(0, (64, 2, 40), "float32"), b.input(1, (), "int32")
    y = b.pointwise("sub", x, b.reduce("max", x, (2,), keepdim=True))
    return b.finish([bounded(b, y, {Bound(80, 64, count)})])


def sums() -> Graph:
    b = GraphBuilder()
    x, count = b.input(0, (3, 64, 40), "float32"), b.input(1, (), "int32")
    return b.finish([bounded(b, b.reduce("sum", x, (2,)), {Bound(1, 64, count)})])


def sums_abreast() -> Graph:
    b = GraphBuilder()
    x, count = b.input(0, (64, 5, 40), "float32"), b.input(1, (), "int32")
    return b.finish([bounded(b, b.reduce("sum", x, (1,)), {Bound(40, 64, count)})])


def elementwise() -> Graph:
    b = GraphBuilder()
    x, count = b.input(0, (3, 64, 40), "float32"), b.input(1, (), "int32")
    y = bounded(b, b.pointwise("exp", x), {Bound(40, 64, count)})
    return b.finish([b.permute(y, (1, 0, 2))])


def lying_across(*, width: int = 40) -> Graph:
    """Squares whose lines cross those of the last axis, where that is short."""
    b = GraphBuilder()
    x, count = b.input(0, (3, 64, 80 // width, width), "float32"), b.input(1, (), "int32")
    y = bounded(b, b.pointwise("exp", b.permute(x, (0, 2, 3, 1))), {Bound(1, 64, count)})
    z = b.input(2, (3, 80 // width, width, 64), "float32")
    return b.finish([b.permute(b.pointwise("add", y, z), (0, 3, 1, 2))])


def joined(lists: int) -> Graph:
    """A concatenation along the innermost axis, which is written part by part."""
    b, shape = GraphBuilder(), (lists, 64, 20)
    x, y = b.input(0, shape, "float32"), b.input(1, shape, "float32")
    count = b.input(2, (), "int32")
    both = b.append("cat", (b.pointwise("neg", y), x), (lists, 64, 40), "float32", dim=2)
    return b.finish([bounded(b, both, {Bound(40, 64, count)})])


@pytest.mark.parametrize(
    ("spec", "families"),
    [
        (product(), {"contraction"}),
        (product(batch=3), {"contraction"}),
        (norm(), {"rows"}),
        (leading_norm(), {"rows"}),
        (sums(), {"rows"}),
        (sums_abreast(), {"lane_per_row"}),
        (elementwise(), {"elementwise"}),
        (joined(1), {"elementwise"}),
        (joined(3), {"elementwise"}),
    ],
)
@pytest.mark.parametrize("count", [0, 1, 13, 63, 64])
def test_what_nobody_needs_is_not_written(spec: Graph, families: set[str], count: int) -> None:
    arrays = K.inputs_for(spec)
    arrays[-1][...] = count
    (expected,) = evaluate(spec, [np.array(a) for a in arrays])
    task = Task("k", spec, TargetSpec.detect(2), 2)
    seen = set()
    for sketch in sketches_for(task):
        if sketch.name not in families:
            continue
        seen.add(sketch.name)
        for point in K.points(sketch, 6):
            kernel = schedule(spec, sketch.name, point)
            built = compile_kernel(kernel, TargetSpec.detect(2))
            given = []
            for array, pack in zip(arrays, kernel.packs, strict=True):
                value = array if pack is None else pack.pack(array)
                given.append(aligned(value.shape, str(value.dtype)))
                given[-1][...] = value
            (out,) = (aligned(o.shape, o.dtype) for o in kernel.outputs)
            out[...] = FILL
            built.bind([*given, out])()
            made, counts = np.asarray(out).reshape(expected.shape), ~np.isnan(expected)
            assert_close([made[counts]], [expected[counts]], 1e-5)
            left = np.mean(made[~counts] == FILL) if count < 50 else 1.0
            assert left > 0.5  # whole tiles are left out, and the last one is written in full
    assert seen == families


def test_keys_that_do_not_count_are_not_read() -> None:
    large, small = layer(1, 200), layer(1, 30)
    bucket = bucketed(large, small)
    (attention,) = [
        k.spec for k in fuse(bucket.graph).kernels
        if sum(n.op == "matmul" for n in k.spec.nodes) == 2
    ]  # fmt: skip
    arrays = K.inputs_for(attention)
    nodes = [attention.nodes[i] for i in attention.inputs]
    for array, node in zip(arrays, nodes, strict=True):
        if node.is_count:
            array[...] = 30
    spoiled = [np.array(a) for a in arrays]
    for array, node in zip(spoiled, nodes, strict=True):
        if 200 in node.shape:  # not even values, whose weights are zero
            axis = node.shape.index(200)
            array[(slice(None),) * axis + (slice(30, None),)] = np.nan
    (expected,) = evaluate(attention, arrays)
    task = Task("k", attention, TargetSpec.detect(2), 2)
    for sketch in sketches_for(task):
        if sketch.name != "attention":
            continue
        for point in K.points(sketch, 6):
            kernel = schedule(attention, sketch.name, point | {"tm": 8, "vl": 16, "nv": 1})
            built = compile_kernel(kernel, TargetSpec.detect(2))
            (out,) = (aligned(o.shape, o.dtype) for o in kernel.outputs)
            given = []
            for array in spoiled:
                given.append(aligned(array.shape, str(array.dtype)))
                given[-1][...] = array
            built.bind([*given, out])()
            made, counts = np.asarray(out).reshape(expected.shape), ~np.isnan(expected)
            assert_close([made[counts]], [expected[counts]], 1e-4)
