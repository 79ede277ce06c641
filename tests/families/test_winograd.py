"""Convolutions by minimal filtering: borders, ragged maps, dilation, images, and what is around."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.emitting import schedule, signature
from tests.families import kernels as K
from torch_pruner.codegen.build.lower import compile_kernel
from torch_pruner.compiler.drafting import draft
from torch_pruner.families.winograd.space import WinogradSketch as Winograd
from torch_pruner.graph.extents import Bound, bounded
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.precision import allow_fast
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

pytestmark = pytest.mark.tvm

TAKEN = {"vl": 16, "tm": 7, "nv": 2, "tb": 2, "mc": 2, "nc": 1, "ku": 2, "ahead": 1, "par": 1}


def conv(
    channels: int,
    size: tuple[int, int],
    columns: int,
    *,
    kernel: tuple[int, int] = (3, 3),
    pad: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    batch: int = 1,
    static: bool = True,
) -> Graph:
    """Scaled inputs, the convolution, bias, a residual and a ReLU."""
    b = GraphBuilder()
    x = b.permute(b.input(0, (batch, *size, channels), "float32"), (0, 3, 1, 2))
    w = b.input(1, (columns, channels, *kernel), "float32", static=static)
    scale = b.input(2, (channels, 1, 1), "float32", static=True)
    x = b.pointwise("relu", b.pointwise("mul", x, scale))
    out = tuple(
        n + 2 * p - d * (k - 1) for n, p, d, k in zip(size, pad, dilation, kernel, strict=True)
    )
    y = b.append(
        "conv", (x, w), (batch, columns, *out), "float32", stride=(1, 1), lo=pad, hi=pad,
        dilation=dilation, groups=1,
    )  # fmt: skip
    y = b.pointwise("add", y, b.input(3, (columns, 1, 1), "float32", static=True))
    other = b.permute(b.input(4, (batch, *out, columns), "float32"), (0, 3, 1, 2))
    y = b.pointwise("relu", b.pointwise("add", y, other))
    return b.finish([b.permute(y, (0, 2, 3, 1))])


def input_gradient(
    channels: int,
    size: tuple[int, int],
    columns: int,
    *,
    kernel: tuple[int, int] = (3, 3),
    pad: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> Graph:
    """What a layer's inputs get of its results: weights turned, and not constant."""
    b = GraphBuilder()
    x = b.permute(b.input(0, (2, *size, channels), "float32"), (0, 3, 1, 2))
    w = b.input(1, (channels, columns // groups, *kernel), "float32")
    lo = tuple(pad * (k - 1) // 2 for k in kernel)
    out = tuple(n - 2 * p + dilation * (k - 1) for n, p, k in zip(size, lo, kernel, strict=True))
    y = b.append(
        "conv_transpose", (x, w), (2, columns, *out), "float32", stride=(1, 1), lo=lo, hi=lo,
        dilation=(dilation,) * 2, groups=groups,
    )  # fmt: skip
    return b.finish([b.permute(y, (0, 2, 3, 1))])


def test_single_elements_of_planes_cost_time() -> None:
    target = TargetSpec.resolve('{"kind": "llvm", "mcpu": "znver4"}', 2)
    last = K.conv(128, 28, 128, 3, 1, 1, groups=4)
    first = K.planar(128, (28, 28), 128, (3, 3), 1, 1, groups=4)
    seconds = []
    for spec in (last, first):
        sketch = Winograd(Task("t", spec, target, 2))
        seconds.append(float(sketch.symbols(sketch.default()[None]).latency_s[0]))
    assert seconds[1] > 1.5 * seconds[0]


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (conv(32, (14, 14), 64), {}),
        (conv(32, (15, 13), 64, static=False), {"nc": 2}),
        (conv(8, (9, 20), 16, kernel=(3, 1), pad=(1, 0), static=False), {"vl": 8, "nv": 1}),
        (input_gradient(32, (14, 13), 64), {"nv": 4}),
        (input_gradient(16, (9, 12), 32, pad=2), {"nv": 1, "mc": 1, "par": 0}),
        (input_gradient(16, (10, 9), 32, dilation=2, kernel=(1, 3)), {}),
        (conv(32, (15, 13), 64), {"nc": 2}),
        (conv(16, (9, 8), 32, pad=(0, 0)), {"tb": 1, "mc": 3}),
        (conv(32, (14, 14), 48, batch=3), {"nv": 3, "tm": 5, "ahead": 0}),
        (conv(32, (20, 20), 32, kernel=(1, 3), pad=(0, 1)), {}),
        (conv(32, (9, 20), 32, kernel=(3, 1), pad=(1, 0)), {"nv": 1, "ku": 1}),
        (conv(32, (20, 20), 32, dilation=(2, 2), pad=(2, 2)), {}),
        (conv(32, (21, 19), 32, dilation=(3, 4), pad=(3, 4)), {}),
        (conv(32, (10, 11), 32, dilation=(12, 12), pad=(12, 12)), {}),
        (conv(16, (4, 4), 16), {"tm": 4, "tb": 1, "nv": 1, "mc": 1, "par": 0}),
        (K.conv(32, 20, 32, 3, 1, 1, rank=1), {"tm": 5}),
        (K.conv(32, 9, 32, 3, 1, 1, rank=3), {}),
        (K.conv(16, 6, 32, 3, 1, 0, rank=3, batch=2, static=False), {"nc": 2, "nv": 1}),
        (K.conv(64, 14, 128, 3, 1, 1, groups=2), {"nv": 4}),
        (K.conv(128, 13, 128, 3, 1, 1, groups=4), {"nc": 4, "mc": 1}),
        (K.conv(64, 13, 64, 3, 1, 1, groups=8), {"vl": 8, "nv": 1, "nc": 2}),
        (K.conv(64, 13, 128, 3, 1, 1, groups=2, static=False), {"nv": 4}),
        (K.conv(32, 7, 64, 3, 1, 1, groups=2, rank=3), {"nv": 2}),
        (input_gradient(32, (14, 13), 64, groups=2), {"nv": 1, "nc": 2}),
        (K.conv(16, 10, 32, 2, 1, 1), {"tm": 4}),
        (K.conv(16, 14, 32, 4, 2, 1), {"tm": 3}),
        (K.conv(32, 13, 32, 4, 2, 2, batch=2), {"tm": 4, "nc": 2, "nv": 1}),
        (K.conv(16, 19, 32, 6, 2, 1), {"tm": 4}),
        (K.conv(16, 21, 32, 6, 3, 0), {"tm": 3, "tb": 1}),
        (K.conv(16, 14, 32, 3, 2, 1), {"tm": 3}),
        (K.conv(64, 14, 64, 3, 2, 1, groups=2), {"nc": 2}),
        (K.conv(16, 12, 32, 5, 1, 2), {"tm": 4}),
        (K.conv(32, 13, 32, 4, 1, 1, batch=2), {"tm": 4}),
        (K.conv(16, 14, 16, 7, 1, 3), {"nv": 1}),
        (K.conv(16, 19, 16, 7, 2, 3), {"tm": 4, "nv": 1}),
        (K.conv(16, 40, 32, 11, 1, 5, rank=1), {"tm": 2}),
        (conv(16, (12, 21), 32, kernel=(1, 7), pad=(0, 3)), {}),
        (conv(16, (33, 9), 32, kernel=(5, 3), pad=(6, 3), dilation=(3, 3)), {}),
        (K.conv(32, 15, 32, 3, 2, 1, batch=2), {"tm": 4, "nc": 2, "nv": 1}),
        (K.conv(16, 17, 32, 5, 2, 2), {"tm": 4}),
        (K.conv(16, 30, 32, 3, 2, 1, rank=1), {"tm": 2}),
        (K.conv(16, 9, 16, 3, 2, 1, rank=3), {"tm": 3, "nv": 1}),
        (K.conv(16, 20, 32, 5, 3, 1), {"tm": 3, "tb": 1, "ahead": 0}),
        (K.conv(16, 30, 32, 4, 2, 1, rank=1), {"tm": 2}),
        (K.conv(16, 10, 16, 4, 2, 1, rank=3), {"tm": 3, "nv": 1}),
        (K.conv_transpose(16, 7, 32, 4, 2, 1, last=True), {"tm": 4}),
        (K.conv_transpose(32, 6, 64, 4, 2, 1, last=True), {"tm": 3, "tb": 1, "nc": 4, "mc": 1}),
        (K.conv_transpose(16, 8, 16, 6, 2, 2, last=True), {"tm": 4, "nv": 1}),
        (K.conv_transpose(16, 6, 16, 6, 3, 0, last=True), {"tm": 4, "nv": 1}),
    ],
)
def test_it_is_the_convolution(spec: Graph, changes: dict[str, int]) -> None:
    outputs, expected, _ = K.run(spec, "winograd", {**TAKEN, **changes})
    assert K.error(outputs, expected) < 1e-6


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (conv(32, (16, 24), 64), {}),
        (conv(32, (15, 13), 64), {"nc": 2}),
        (conv(32, (14, 17), 48, batch=3), {"nv": 3, "tm": 5, "ahead": 0}),
        (conv(32, (15, 13), 64, static=False), {"nc": 2}),
        (conv(16, (19, 18), 32, pad=(0, 0)), {"tb": 1, "mc": 3}),
        (conv(16, (19, 18), 32, pad=(0, 2)), {"tb": 1}),
        (conv(8, (9, 20), 16, kernel=(3, 1), pad=(1, 0), static=False), {"vl": 8, "nv": 1}),
        (conv(32, (20, 20), 32, kernel=(1, 3), pad=(0, 1)), {}),
        (conv(32, (21, 19), 32, dilation=(3, 4), pad=(3, 4)), {}),
        (conv(32, (5, 3), 32, dilation=(12, 12), pad=(12, 12)), {"tm": 3, "tb": 1}),
        (conv(16, (3, 3), 16), {"tm": 1, "tb": 1, "nv": 1, "mc": 1, "par": 0}),
        (input_gradient(32, (14, 13), 64), {"nv": 4}),
        (input_gradient(16, (10, 9), 32, dilation=2, kernel=(1, 3)), {}),
        (K.conv(32, 20, 32, 3, 1, 1, rank=1), {"tm": 2}),
        (K.conv(64, 15, 64, 3, 1, 1, groups=2), {"nc": 2}),
    ],
)
def test_four_results_of_a_tile_are_the_convolution(spec: Graph, changes: dict[str, int]) -> None:
    taken = {**TAKEN, "tm": 3, **changes}
    outputs, expected, _ = K.run(allow_fast(spec), "winograd4", taken)
    assert K.error(outputs, expected) < 2e-6


def test_four_results_of_a_tile_are_off_by_what_is_said() -> None:
    """docs/kernels.md states up to sixteen times the sum's error."""
    spec = allow_fast(K.conv(128, 14, 64, 3, 1, 1))
    exact, direct = _exact(spec), _by_the_sum(spec)
    (output,), _, _ = K.run(spec, "winograd4", {**TAKEN, "tm": 4})
    assert np.abs(output - exact).max() <= 16 * np.abs(direct - exact).max()
    assert np.abs(output - exact).max() <= 5e-6 * exact.max()


@pytest.mark.parametrize("rank", [2, 3])
def test_it_rounds_no_worse_than_the_sum(rank: int) -> None:
    """Against float64: the bound on whole networks rests on this."""
    spec = K.conv(128, (14, 8)[rank - 2], 64, 3, 1, 1, rank=rank)
    exact, direct = _exact(spec), _by_the_sum(spec)
    (output,), _, _ = K.run(spec, "winograd", TAKEN)
    assert np.abs(output - exact).max() <= 2 * np.abs(direct - exact).max()


def _exact(spec: Graph) -> np.ndarray:
    """Results in float64, of a convolution with a border of one."""
    arrays = K.inputs_for(spec)
    given, w = (a.astype(np.float64) for a in arrays)
    _, *extents, _ = given.shape
    x = np.pad(given, ((0, 0), *((1, 1) for _ in extents), (0, 0)))
    exact = 0.0
    for tap in itertools.product(range(3), repeat=len(extents)):
        at = tuple(slice(t, t + n) for t, n in zip(tap, extents, strict=True))
        exact = exact + x[:, *at] @ w[:, :, *tap].T
    return np.maximum(exact, 0)


def _by_the_sum(spec: Graph) -> np.ndarray:
    direct = {"vl": 16, "tm": 7, "nv": 2, "mc": 2, "order": 1, "ku": 2, "pack": 1, "par": 1}
    (output,), _, _ = K.run(spec, "contraction", {**direct, "ahead": 1, "kb": 1})
    return output


def test_the_draft_takes_it_where_arithmetic_is_the_limit() -> None:
    target = TargetSpec.from_dict({"kind": "llvm", "mcpu": "icelake-server"}, 2)
    assert draft(Task("k", K.conv(64, 56, 64, 3, 1, 1), target, 2)).sketch == "winograd"
    assert draft(Task("k", K.conv(64, 56, 64, 3, 2, 1), target, 2)).sketch == "winograd"
    assert draft(Task("k", K.conv(64, 56, 64, 1, 2, 0), target, 2)).sketch == "contraction"
    assert draft(Task("k", input_gradient(64, (56, 56), 64), target, 2)).sketch == "winograd"
    volume = K.conv(128, 14, 128, 3, 1, 1, rank=3)  # 64 products in place of 216
    assert draft(Task("k", volume, target, 2)).sketch == "winograd"
    assert draft(Task("k", K.conv(256, 28, 256, 3, 1, 1, groups=4), target, 2)).sketch == "winograd"
    few = conv(256, (3, 3), 256, static=False)  # weights take longer than what they save
    assert draft(Task("k", few, target, 2)).sketch == "contraction"


def test_the_draft_takes_four_results_where_they_are_allowed_and_pay() -> None:
    target = TargetSpec.from_dict({"kind": "llvm", "mcpu": "icelake-server"}, 2)
    for size, channels, expected in ((56, 64, "winograd4"), (28, 128, "winograd4")):
        spec = K.conv(channels, size, channels, 3, 1, 1)
        assert draft(Task("k", spec, target, 2)).sketch == "winograd"
        assert draft(Task("k", allow_fast(spec), target, 2)).sketch == expected
    far = allow_fast(K.conv(512, 7, 512, 3, 1, 1))  # 36 products of each weight, from memory
    assert draft(Task("k", far, target, 2)).sketch != "winograd4"


def test_the_draft_takes_it_for_images_of_every_size_as_well() -> None:
    """Its cost was that of the largest image, the direct sum's that of half of its sides."""
    given, b = K.conv(64, 56, 64, 3, 1, 1), GraphBuilder()
    places: list[int] = []
    for node in given.nodes:
        places.append(b.again(node, [places[x] for x in node.inputs]))
    count = b.input(len(given.inputs), (), "int32", counts=True)
    bounds = {Bound(56 * 64, 56, count), Bound(64, 56, count)}
    spec = b.finish([bounded(b, places[given.outputs[0]], bounds)])
    target = TargetSpec.from_dict({"kind": "llvm", "mcpu": "icelake-server"}, 2)
    assert draft(Task("k", spec, target, 2)).sketch == "winograd"


def test_no_schedule_of_a_volume_needs_more_memory_than_it_may() -> None:
    """Every task has its transformed inputs: all of them at once, once for each share."""
    target = TargetSpec.from_dict({"kind": "llvm", "mcpu": "icelake-server"}, 2)
    spec = K.conv(64, 40, 64, 3, 1, 1, rank=3)
    sketch = Winograd(Task("k", spec, target, 2))
    rng = np.random.default_rng(0)
    points = np.stack([rng.choice(options, 4000) for options in sketch.domains], axis=1)
    valid = points[sketch.valid(points)]
    assert len(valid) > 100
    for point in valid[:200]:
        decisions = dict(zip(sketch.names, map(int, point), strict=True))
        scratch = signature(spec, "winograd", decisions).scratch
        assert sum(4 * np.prod(s.shape) for s in scratch) <= 128 << 20


def test_an_infinite_input_stays_in_its_tiles() -> None:
    """It spreads, as NaN, over the results of the tiles that read it, and no further."""
    spec = K.conv(16, 16, 16, 3, 1, 1)
    kernel = schedule(spec, "winograd", {**TAKEN, "nv": 1})
    built = compile_kernel(kernel, TargetSpec.detect(2))
    arrays = K.inputs_for(spec)
    arrays[0][0, 8, 8, 3] = np.inf
    given = [
        a if p is None else K.aligned(p.pack(a).shape, "float32")
        for a, p in zip(arrays, kernel.packs, strict=True)
    ]
    given[1][...] = kernel.packs[1].pack(arrays[1])
    out = K.aligned(kernel.outputs[0].shape, "float32")
    built.bind([*given, out])()
    assert not np.isfinite(out[0, 7:10, 7:10]).all()
    untouched = np.ones((16, 16), dtype=bool)
    untouched[6:10, 6:10] = False
    assert np.isfinite(out[0][untouched]).all()
