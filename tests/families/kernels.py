"""Kernel graphs for code generation tests, and the check against the reference interpreter."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.emitting import schedule
from torch_pruner.codegen.build.lower import LoadedKernel, aligned, compile_kernel
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate
from torch_pruner.graph.updates import before_updates
from torch_pruner.target import TargetSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.codegen.parts.kernel import ScheduledKernel
    from torch_pruner.families.space import Sketch

Array = npt.NDArray[Any]


def inputs_for(spec: Graph, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    arrays = []
    words = {n.inputs[1] for n in spec.nodes if n.op == "matmul_grouped"}
    for i in spec.inputs:
        node = spec.nodes[i]
        array = aligned(node.shape, node.dtype)
        floating = node.dtype.startswith(("float", "bfloat"))
        least = -4 if node.dtype == "int8" else 0  # others may be positions
        ends = (-(1 << 31), 1 << 31) if i in words else (least, 4)
        draw = rng.standard_normal if floating else partial(rng.integers, *ends)
        array[...] = draw(node.shape)
        arrays.append(array)
    return arrays


def prepared_outputs(spec: Graph, kernel: ScheduledKernel, arrays: list[Array]) -> list[Array]:
    """Memory for a kernel's outputs: as their inputs where it writes in place; else no numbers."""
    outputs = [aligned(o.shape, o.dtype) for o in kernel.outputs]
    for out in outputs:
        out.reshape(-1).view(np.uint8)[...] = 0xFF  # what is not written is not right by chance
    if (before := before_updates(spec)) is not None:
        for out, value in zip(outputs, evaluate(before, arrays), strict=True):
            out[...] = value
    return outputs


def run(
    spec: Graph,
    sketch: str,
    decisions: Mapping[str, int],
    threads: int = 2,
    inputs: list[Array] | None = None,
) -> tuple[list[Array], list[Array], LoadedKernel]:
    """Outputs of the generated kernel and of the reference, and the kernel."""
    arrays = inputs_for(spec) if inputs is None else inputs
    expected = evaluate(spec, arrays)
    kernel = schedule(spec, sketch, decisions)
    built = compile_kernel(kernel, TargetSpec.detect(threads))
    given = []
    for array, pack in zip(arrays, kernel.packs, strict=True):
        if pack is not None:
            packed = pack.pack(array)
            array = aligned(packed.shape, str(packed.dtype))
            array[...] = packed
        given.append(array)
    outputs = [aligned(o.shape, o.dtype) for o in kernel.outputs]
    built.bind([*given, *outputs])()
    return outputs, expected, built


def points(sketch: Sketch, count: int) -> list[dict[str, int]]:
    """The draft and ``count`` points anywhere in the space of a sketch."""
    grid = np.stack(np.meshgrid(*sketch.domains, indexing="ij"), axis=-1)
    grid = grid.reshape(-1, len(sketch.names))
    grid = grid[sketch.valid(grid)]
    chosen = np.random.default_rng(0).permutation(len(grid))[:count]
    return [dict(sketch.named(p)) for p in [sketch.default(), *grid[chosen]]]


def error(outputs: list[Array], expected: list[Array]) -> float:
    """Largest difference relative to the largest expected magnitude."""
    worst = 0.0
    for got, want in zip(outputs, expected, strict=True):
        a, b = got.astype(np.float64), want.astype(np.float64)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        diff = np.nan_to_num(np.abs(a - b)).max(initial=0.0)
        worst = max(worst, float(diff / (np.nan_to_num(np.abs(b)).max(initial=0.0) + 1e-30)))
    return worst


def linear(m: int, n: int, k: int, *, static: bool = True, dtype: str = "float32") -> Graph:
    b = GraphBuilder()
    x, w = b.input(0, (1, m, k), dtype), b.input(1, (n, k), dtype, static=static)
    bias = b.input(2, (n,), dtype, static=True)
    y = b.matmul(b.reshape(x, (m, k)), b.permute(w, (1, 0)))
    y = b.pointwise("relu", b.pointwise("add", y, bias))
    return b.finish([b.reshape(y, (1, m, n))])


def changing(m: int, n: int, k: int) -> Graph:
    """A product of two matrices, both of which change, as they lie."""
    b = GraphBuilder()
    x, y = b.input(0, (m, k), "float32"), b.input(1, (k, n), "float32")
    return b.finish([b.pointwise("relu", b.matmul(x, y))])


def neighbours(m: int, n: int, k: int, *, dtype: str = "float32") -> Graph:
    """A linear layer whose weights have neighbouring columns, as GPT-2's do."""
    b = GraphBuilder()
    x, w = b.input(0, (m, k), dtype), b.input(1, (k, n), dtype, static=True)
    return b.finish([b.pointwise("relu", b.matmul(x, w))])


def attention_scores(heads: int, rows: int, dim: int, *, dtype: str = "float32") -> Graph:
    b = GraphBuilder()
    shape = (1, rows, heads, dim)
    q, k = (b.input(i, (1, rows, heads * dim), dtype) for i in range(2))
    q, k = (b.permute(b.reshape(t, shape), (0, 2, 1, 3)) for t in (q, k))
    return b.finish([b.matmul(q, b.permute(k, (0, 1, 3, 2)))])


def conv(
    channels: int,
    size: int,
    out: int,
    kernel: int,
    stride: int,
    pad: int,
    groups: int = 1,
    *,
    rank: int = 2,
    batch: int = 1,
    dtype: str = "float32",
    static: bool = True,
) -> Graph:
    b = GraphBuilder()
    spatial = (size,) * rank
    last = (0, rank + 1, *range(1, rank + 1))
    x = b.permute(b.input(0, (batch, *spatial, channels), dtype), last)
    w = b.input(1, (out, channels // groups, *(kernel,) * rank), dtype, static=static)
    extent = (size + 2 * pad - kernel) // stride + 1
    y = b.append(
        "conv",
        (x, w),
        (batch, out, *(extent,) * rank),
        dtype,
        stride=(stride,) * rank,
        lo=(pad,) * rank,
        hi=(pad,) * rank,
        dilation=(1,) * rank,
        groups=groups,
    )
    return b.finish([b.permute(b.pointwise("relu", y), (0, *range(2, rank + 2), 1))])


def planar(
    channels: int,
    size: tuple[int, ...],
    out: int,
    kernel: tuple[int, ...],
    stride: int = 1,
    pad: int = 0,
    groups: int = 1,
    *,
    dilation: int = 1,
    batch: int = 1,
    residual: bool = False,
) -> Graph:
    """A convolution with a bias and an activation, channels first."""
    b, rank = GraphBuilder(), len(size)
    x = b.input(0, (batch, channels, *size), "float32")
    w = b.input(1, (out, channels // groups, *kernel), "float32", static=True)
    extent = tuple(
        (n + 2 * pad - dilation * (k - 1) - 1) // stride + 1
        for n, k in zip(size, kernel, strict=True)
    )
    shape = (batch, out, *extent)
    hi = tuple(
        (e - 1) * stride + dilation * (k - 1) + 1 - n - pad
        for e, k, n in zip(extent, kernel, size, strict=True)
    )
    y = b.append(
        "conv", (x, w), shape, "float32", stride=(stride,) * rank, lo=(pad,) * rank, hi=hi,
        dilation=(dilation,) * rank, groups=groups,
    )  # fmt: skip
    bias = b.input(2, (out, *(1,) * rank), "float32", static=True)
    y = b.pointwise("add", y, bias)
    if residual:
        y = b.pointwise("add", y, b.input(3, shape, "float32"))
    return b.finish([b.pointwise("relu", y)])


def conv_transpose(
    channels: int,
    size: int,
    out: int,
    kernel: int,
    stride: int,
    pad: int,
    *,
    dtype: str = "float32",
    static: bool = True,
    last: bool = False,
    first: bool = False,
) -> Graph:
    """``last``: of an input that lies channels last; ``first``: to a result that lies channels
    first."""
    b = GraphBuilder()
    shape = (1, size, size, channels) if last else (1, channels, size, size)
    x = b.input(0, shape, dtype)
    x = b.permute(x, (0, 3, 1, 2)) if last else x
    w = b.input(1, (channels, out, kernel, kernel), dtype, static=static)
    extent = (size - 1) * stride - 2 * pad + kernel
    y = b.append(
        "conv_transpose",
        (x, w),
        (1, out, extent, extent),
        dtype,
        stride=(stride, stride),
        lo=(pad, pad),
        dilation=(1, 1),
        groups=1,
    )
    if first:
        return b.finish([b.pointwise("relu", y)])
    return b.finish([b.permute(y, (0, 2, 3, 1))])


def turned(rows: int, columns: int, depth: int, *, batch: int = 0, dtype: str = "float32") -> Graph:
    """A product whose first operand lies transposed, as in the gradient of a layer's weights."""
    b = GraphBuilder()
    lead = (batch,) if batch else ()
    dims = range(len(lead))
    x, y = (
        b.input(0, (*lead, depth, rows), dtype),
        b.input(1, (*lead, depth, columns), dtype),
    )
    x = b.permute(x, (*dims, len(lead) + 1, len(lead)))
    return b.finish([b.pointwise("add", b.matmul(x, y), b.const(1.0, dtype))])


def weight_gradient(
    channels: int,
    size: int,
    out: int,
    kernel: int,
    stride: int,
    pad: int,
    *,
    rank: int = 2,
    batch: int = 2,
    dtype: str = "float32",
) -> Graph:
    """Of the convolution with these sizes, both operands channels last, in torch's order."""
    b = GraphBuilder()
    last, turn = (0, rank + 1, *range(1, rank + 1)), (1, 0, *range(2, rank + 2))
    extent = (size + 2 * pad - kernel) // stride + 1
    x = b.permute(b.input(0, (batch, *(size,) * rank, channels), dtype), last)
    grad = b.permute(b.input(1, (batch, *(extent,) * rank, out), dtype), last)
    hi = (extent - 1) * stride + kernel - size - pad
    if hi < 0:  # the last positions of the input are never read
        x = b.slice(
            x, (0,) * (rank + 2), (batch, channels, *(size + hi,) * rank), (1,) * (rank + 2)
        )
    y = b.append(
        "conv",
        (b.permute(x, turn), b.permute(grad, turn)),
        (channels, out, *(kernel,) * rank),
        dtype,
        stride=(1,) * rank,
        lo=(pad,) * rank,
        hi=(max(hi, 0),) * rank,
        dilation=(stride,) * rank,
        groups=1,
    )
    return b.finish([b.permute(y, turn)])


def layer_norm(shape: tuple[int, ...]) -> Graph:
    b = GraphBuilder()
    x, w = b.input(0, shape, "float32"), b.input(1, shape[-1:], "float32")
    scale = b.const(1 / shape[-1], "float32")
    axis = (len(shape) - 1,)
    mean = b.pointwise("mul", b.reduce("sum", x, axis, keepdim=True), scale)
    centred = b.pointwise("sub", x, mean)
    var = b.pointwise(
        "mul", b.reduce("sum", b.pointwise("mul", centred, centred), axis, keepdim=True), scale
    )
    inv = b.pointwise("rsqrt", b.pointwise("add", var, b.const(1e-5, "float32")))
    return b.finish(
        [b.pointwise("mul", b.pointwise("mul", centred, inv), w), b.reshape(inv, shape[:-1])]
    )


def softmax(shape: tuple[int, ...]) -> Graph:
    b = GraphBuilder()
    x = b.input(0, shape, "float32")
    axis = (len(shape) - 1,)
    e = b.pointwise("exp", b.pointwise("sub", x, b.reduce("max", x, axis, keepdim=True)))
    return b.finish([b.pointwise("div", e, b.reduce("sum", e, axis, keepdim=True))])


def max_pool(size: int, channels: int) -> Graph:
    b = GraphBuilder()
    x = b.permute(b.input(0, (1, size, size, channels), "float32"), (0, 3, 1, 2))
    half = size // 2
    y = b.append(
        "window_max",
        (x,),
        (1, channels, half, half),
        "float32",
        kernel=(3, 3),
        stride=(2, 2),
        lo=(1, 1),
        hi=(1, 1),
        dilation=(1, 1),
    )
    return b.finish([b.permute(y, (0, 2, 3, 1))])
