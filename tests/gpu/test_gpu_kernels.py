"""GPU kernels without a GPU: numbers on the host, machine code from NVRTC where it is installed.

The same schedule runs as loops (see ``codegen.parts.gpu.grid``), so indices, guards, tiles, stages,
fragments and reductions are checked against the reference at sizes that divide and that do not.
"""

from __future__ import annotations

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from tests.families import updates as U
from tests.unit.graph.attention_graphs import Case, attention
from torch_pruner.codegen.build.gpu import nvrtc
from torch_pruner.codegen.build.gpu.driver import CudaDriver
from torch_pruner.codegen.build.gpu.image import GpuProgram, launches_of, load_gpu_program
from torch_pruner.codegen.build.gpu.source import cuda_source
from torch_pruner.codegen.build.lower import aligned, compile_kernel
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.memory import Place
from torch_pruner.graph.precision import allow_tf32, is_tf32
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(4)]
TINY = {"bm": 32, "bn": 32, "bk": 16, "tm": 4, "tn": 4, "stages": 1, "tensor": 0, "ahead": 0}
TENSOR = {"bm": 64, "bn": 64, "bk": 32, "tm": 32, "tn": 32, "stages": 2, "tensor": 1, "ahead": 0}
WARPGROUP = {"bm": 64, "bn": 64, "bk": 64, "stages": 4, "warpgroups": 1, "split": 1}
DOTS = {"threads": 64, "along": 32, "columns": 2, "ahead": 1}
ATTENTION = {"bm": 32, "bn": 32, "stages": 1, "ahead": 0}


def error(spec: Graph, sketch: str, decisions: dict[str, int]) -> float:
    """Largest relative difference between the kernel as loops on the host and the reference."""
    arrays = K.inputs_for(spec)
    expected = evaluate(spec, arrays)
    assert any(np.abs(e.astype(np.float64)).max() > 0 for e in expected), "nothing is compared"
    kernel = schedule(spec, sketch, decisions, host=True)
    built = compile_kernel(kernel, TargetSpec.detect(1))
    given = []
    for array, pack in zip(arrays, kernel.packs, strict=True):
        if pack is not None:
            packed = pack.pack(array)
            array = aligned(packed.shape, str(packed.dtype))
            array[...] = packed
        given.append(array)
    outputs = K.prepared_outputs(spec, kernel, arrays)
    built.bind([*given, *outputs])()
    return K.error(outputs, expected)


def pointwise(n: int, dtype: str = "float32") -> Graph:
    b = GraphBuilder()
    x, y = (b.input(i, (n,), dtype) for i in range(2))
    return b.finish([b.pointwise("mul", b.pointwise("tanh", x), b.pointwise("relu", y))])


def kept(n: int, width: int = 0) -> Graph:
    """Where a mask holds; with ``width``, which results of a product are positive."""
    b = GraphBuilder()
    if width:
        x, w = b.input(0, (n, width), "float16"), b.input(1, (width, 64), "float16", static=True)
        return b.finish([b.pointwise("gt", b.matmul(x, w), b.const(0.0, "float16"))])
    x, mask = b.input(0, (n,), "float32"), b.input(1, (n,), "bool")
    return b.finish([b.pointwise("where", mask, x, b.const(1.0, "float32"))])


def softmax(rows: int, width: int, dtype: str = "float32") -> Graph:
    b = GraphBuilder()
    x = b.input(0, (rows, width), dtype)
    if dtype != "float32":  # as torch computes it
        y = b.cast(x, "float32")
        top = b.reduce("max", y, [1], keepdim=True)
        powers = b.pointwise("exp", b.pointwise("sub", y, top))
        total = b.reduce("sum", powers, [1], keepdim=True)
        return b.finish([b.cast(b.pointwise("div", powers, total), dtype)])
    top = b.reduce("max", x, [1], keepdim=True)
    powers = b.pointwise("exp", b.pointwise("sub", x, top))
    return b.finish([b.pointwise("div", powers, b.reduce("sum", powers, [1], keepdim=True))])


def mean_and_square(rows: int, width: int) -> Graph:
    """Two reductions, the second of what the first gave; one output per row, one per element."""
    b = GraphBuilder()
    x = b.input(0, (rows, width), "float32")
    mean = b.pointwise(
        "div", b.reduce("sum", x, [1], keepdim=True), b.const(float(width), "float32")
    )
    centred = b.pointwise("sub", x, mean)
    square = b.reduce("sum", b.pointwise("mul", centred, centred), [1])
    return b.finish([centred, square])


def down(rows: int, columns: int, dtype: str = "float32") -> Graph:
    """Sums over the rows, two of them, as the gradients of a norm's weights and biases are."""
    b = GraphBuilder()
    x, y = (b.input(i, (rows, columns), dtype) for i in range(2))
    return b.finish([b.reduce("sum", v, [0]) for v in (x, b.pointwise("mul", x, y))])


def normed(batch: int, side: int, channels: int) -> Graph:
    """What is left of each channel's mean over a batch and positions, channels last, and squares of
    that."""
    b = GraphBuilder()
    x = b.input(0, (batch, side, channels), "float32")
    count = b.const(float(batch * side), "float32")
    mean = b.pointwise("div", b.reduce("sum", x, [0, 1], keepdim=True), count)
    centred = b.pointwise("sub", x, mean)
    square = b.reduce("sum", b.pointwise("mul", centred, centred), [0, 1])
    return b.finish([centred, square])


def seen(op: str, rows: int, width: int) -> Graph:
    """Whether any, or all, of a row holds."""
    b = GraphBuilder()
    x = b.input(0, (rows, width), "float32")
    bound = b.const(3.0 if op == "any" else -1.5, "float32")
    return b.finish([b.reduce(op, b.pointwise("gt", x, bound), [1])])


def arg(op: str, rows: int, width: int) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (rows, width), "float32")
    return b.finish([b.reduce(op, x, [1], dtype="int64")])


def ends(rows: int, width: int) -> Graph:
    """Two positions of each row, and a sum."""
    b = GraphBuilder()
    x = b.input(0, (rows, width), "float32")
    first = b.reduce("argmax", x, [1], dtype="int64")
    last = b.reduce("argmin", x, [1], dtype="int64")
    return b.finish([first, last, b.reduce("sum", x, [1])])


def turned(rows: int, width: int) -> Graph:
    """A softmax whose elements meet others of their row, which other threads have kept."""
    b = GraphBuilder()
    x = b.input(0, (rows, width), "float32")
    top = b.reduce("max", x, [1], keepdim=True)
    powers = b.pointwise("exp", b.pointwise("sub", x, top))
    y = b.pointwise("div", powers, b.reduce("sum", powers, [1], keepdim=True))
    half = width // 2
    halves = b.slice(y, (0, half), (rows, width - half)), b.slice(y, (0, 0), (rows, half))
    other = b.append("cat", halves, (rows, width), "float32", dim=1)
    return b.finish([b.pointwise("add", y, other)])


def pool() -> Graph:
    b = GraphBuilder()
    x = b.input(0, (1, 8, 15, 15), "float32")
    ends = {"kernel": (3, 3), "stride": (2, 2), "lo": (1, 1), "hi": (1, 1), "dilation": (1, 1)}
    return b.finish([b.append("window_max", (x,), (1, 8, 8, 8), "float32", **ends)])


def located_pool() -> Graph:
    """A maximum and its position."""
    b = GraphBuilder()
    x = b.input(0, (1, 8, 15, 15), "bfloat16")
    ends = {"kernel": (3, 3), "stride": (2, 2), "lo": (1, 1), "hi": (1, 1), "dilation": (1, 1)}
    best = b.append("window_max", (x,), (1, 8, 8, 8), "bfloat16", **ends)
    place = b.append("window_argmax", (x,), (1, 8, 8, 8), "int32", **ends)
    return b.finish([best, b.cast(place, "int64")])


def rounded(spec: Graph) -> Graph:
    """The same with operands that tensor cores may round to tf32."""
    return allow_tf32(spec, {"matmul", "conv"})


def scores(heads: int, rows: int, dim: int) -> Graph:
    """Queries by keys: the second operand lies along the reduction."""
    b = GraphBuilder()
    q, k = (b.input(i, (heads, rows, dim), "float16") for i in range(2))
    return b.finish([b.matmul(q, b.permute(k, (0, 2, 1)))])


def weighted(heads: int, rows: int, dim: int) -> Graph:
    """Powers by values: the second operand lies along its columns."""
    b = GraphBuilder()
    p = b.input(0, (heads, rows, 64), "float16")
    v = b.input(1, (heads, 64, dim), "float16")
    return b.finish([b.matmul(p, v)])


def of_bytes(rows: int, columns: int, depth: int, *, beside: bool = False) -> Graph:
    """A product with int8 weights that have a scale for each column. ``beside``: these lie next to
    each other."""
    b = GraphBuilder()
    x, scale = b.input(0, (rows, depth), "float16"), b.input(2, (columns,), "float32", static=True)
    q = b.input(1, (depth, columns) if beside else (columns, depth), "int8", static=True)
    w = q if beside else b.permute(q, (1, 0))
    total = b.append("matmul", (x, w), (rows, columns), "float32")
    return b.finish([b.cast(b.pointwise("mul", total, scale), "float16")])


def of_words(
    rows: int,
    columns: int,
    depth: int,
    bits: int,
    group: int,
    *,
    offsets: bool = False,
    dtype: str = "float16",
) -> Graph:
    """A product with weights of few bits, whose groups have a scale and perhaps an offset."""
    b = GraphBuilder()
    x, each = b.input(0, (rows, depth), dtype), 32 // bits
    words = b.input(1, (-(-depth // each), columns), "int32", static=True)
    shape = (-(-depth // group), columns)
    factors = [b.input(2, shape, "bfloat16", static=True)]
    factors += [b.input(3, shape, "float32", static=True)] if offsets else []
    attrs = {"bits": bits, "group": group}
    given = (x, words, *factors)
    total = b.append("matmul_grouped", given, (rows, columns), "float32", **attrs)
    return b.finish([b.cast(total, dtype)])


def gated(rows: int, columns: int, depth: int, dtype: str) -> Graph:
    """A product whose first operand is computed on the way, as behind a gate."""
    b = GraphBuilder()
    x, y = (b.input(i, (rows, depth), dtype) for i in range(2))
    w = b.input(2, (columns, depth), dtype, static=True)
    given = b.pointwise("mul", b.pointwise("relu", x), y)
    return b.finish([b.matmul(given, b.permute(w, (1, 0)))])


def gradient(m: int, n: int, rows: int, dtype: str, span: int = 0) -> Graph:
    """Of weights: both operands lie along what is summed up. ``span``: columns of the first input,
    of which the product reads the last ``m``."""
    b = GraphBuilder()
    x, y = b.input(0, (rows, span or m), dtype), b.input(1, (rows, n), dtype)
    if span:
        x = b.slice(x, (0, span - m), (rows, m))
    return b.finish([b.matmul(b.permute(x, (1, 0)), y)])


def flipped(rows: int, width: int) -> Graph:
    """Every row twice, from its end on."""
    b = GraphBuilder()
    x = b.reshape(b.input(0, (rows, width), "float32"), (rows, 1, width))
    twice = b.append("broadcast", (x,), (rows, 2, width), "float32")
    wide = b.reshape(twice, (rows, 2 * width))
    return b.finish(
        [b.pointwise("neg", b.append("flip", (wide,), (rows, 2 * width), "float32", dims=(1,)))]
    )


def inverted(n: int, dtype: str) -> Graph:
    """Whole numbers with all bits turned, and a difference, which turns bits if it is of 64."""
    b = GraphBuilder()
    x, y = (b.input(i, (n,), dtype) for i in range(2))
    return b.finish([b.pointwise("bitwise_not", x), b.pointwise("sub", x, y)])


def planes(dtype: str = "float32") -> Graph:
    """A convolution whose channels are apart."""
    b = GraphBuilder()
    x = b.input(0, (2, 12, 9, 11), dtype)
    w = b.input(1, (24, 12, 3, 3), dtype, static=True)
    ends = {"stride": (2, 1), "lo": (1, 1), "hi": (1, 1), "dilation": (1, 1), "groups": 1}
    return b.finish([b.append("conv", (x, w), (2, 24, 5, 11), dtype, **ends)])


CASES: dict[str, tuple[Graph, str, dict[str, int]]] = {
    "pointwise": (pointwise(1024), "gpu_elementwise", {"vl": 4, "threads": 128}),
    "pointwise with a rest": (pointwise(1001), "gpu_elementwise", {"vl": 1, "threads": 128}),
    "pointwise half": (pointwise(1024, "float16"), "gpu_elementwise", {"vl": 4, "threads": 64}),
    "inverted int64": (inverted(1024, "int64"), "gpu_elementwise", {"vl": 2, "threads": 64}),
    "inverted int32": (inverted(1024, "int32"), "gpu_elementwise", {"vl": 4, "threads": 64}),
    "pointwise with a mask": (kept(1024), "gpu_elementwise", {"vl": 4, "threads": 64}),
    "softmax": (softmax(7, 197), "gpu_rows", {"threads": 64}),
    "softmax in a warp": (softmax(3, 20), "gpu_rows", {"threads": 32}),
    "softmax in many": (softmax(3, 1024), "gpu_rows", {"threads": 1024}),
    "variance": (mean_and_square(5, 100), "gpu_rows", {"threads": 64}),
    "argmax": (arg("argmax", 5, 300), "gpu_rows", {"threads": 64}),
    "argmin": (arg("argmin", 5, 30), "gpu_rows", {"threads": 32}),
    "both ends": (ends(5, 300), "gpu_rows", {"threads": 64}),
    "softmax, turned": (turned(5, 100), "gpu_rows", {"threads": 64}),
    "softmax, turned in a warp": (turned(5, 100), "gpu_rows", {"threads": 32}),
    "softmax in vectors": (softmax(7, 196), "gpu_rows", {"threads": 64, "vl": 4}),
    "softmax of halves": (softmax(5, 392, "float16"), "gpu_rows", {"threads": 96, "vl": 4}),
    "softmax of bfloat16": (softmax(6, 132, "bfloat16"), "gpu_rows", {"threads": 32, "vl": 4}),
    "a warp each": (softmax(13, 64), "gpu_rows", {"threads": 32, "vl": 2, "rows": 4}),
    "variance, a warp each": (
        mean_and_square(6, 100), "gpu_rows", {"threads": 32, "vl": 4, "rows": 2},
    ),
    "argmax in vectors": (arg("argmax", 5, 300), "gpu_rows", {"threads": 64, "vl": 4}),
    "any": (seen("any", 5, 300), "gpu_rows", {"threads": 64}),
    "all, a warp each": (seen("all", 7, 20), "gpu_rows", {"threads": 32, "rows": 2}),
    "sums down": (down(100, 70), "gpu_rows", {"threads": 8, "rows": 32, "abreast": 1}),
    "sums down of halves": (
        down(37, 64, "float16"), "gpu_rows", {"threads": 32, "rows": 32, "abreast": 1},
    ),
    "norm over a batch": (
        normed(4, 9, 40), "gpu_rows", {"threads": 4, "rows": 32, "abreast": 1},
    ),
    "parts of a row": (softmax(2, 1000), "gpu_rows", {"threads": 64, "vl": 4, "split": 4}),
    "parts of a row, its place": (ends(3, 301), "gpu_rows", {"threads": 32, "split": 2}),
    "parts of sums down": (
        down(100, 70, "bfloat16"), "gpu_rows",
        {"threads": 4, "rows": 32, "abreast": 1, "split": 8},
    ),
    "parts of a norm over a batch": (
        normed(4, 9, 40), "gpu_rows", {"threads": 4, "rows": 32, "abreast": 1, "split": 2},
    ),
    "update": (U.graph(U.Case(places=(5,))), "gpu_update", {"vl": 4, "threads": 64}),
    "update in place": (
        U.graph(U.Case(places=(70,), dtype="float16"), in_place=True), "gpu_update",
        {"vl": 2, "threads": 64},
    ),
    "update of one row in place": (
        U.graph(U.Case(dtype="bfloat16"), in_place=True), "gpu_update", {"vl": 4, "threads": 64},
    ),
    "update of positions of two axes": (
        U.graph(U.Case((4, 6, 5), 1, (2, 3), 2)), "gpu_update", {"vl": 1, "threads": 64},
    ),
    "update in another order": (
        U.graph(U.Case((2, 40, 6, 16), 2, (3,), order=(0, 2, 1, 3)), in_place=True), "gpu_update",
        {"vl": 2, "threads": 32},
    ),
    "update of a line": (U.graph(U.Case((9,), 0, (2,))), "gpu_update", {"vl": 1, "threads": 64}),
    "flipped, in another shape": (
        flipped(7, 9), "gpu_elementwise", {"vl": 1, "threads": 64},
    ),
    "pool": (pool(), "gpu_columns", {"threads": 64}),
    "pool with positions": (located_pool(), "gpu_columns", {"threads": 64}),
    "depthwise": (K.conv(8, 14, 8, 3, 2, 1, 8), "gpu_direct", {"threads": 64}),
    "small product": (K.linear(5, 7, 9), "gpu_direct", {"threads": 64}),
    "few rows": (K.linear(3, 45, 200, dtype="float16"), "gpu_dots", DOTS),
    "one row, two warps a column": (
        K.linear(1, 70, 1032, dtype="float16"), "gpu_dots",
        DOTS | {"threads": 128, "along": 64, "columns": 4, "ahead": 2},
    ),
    "few rows, turns left over": (
        K.linear(5, 33, 800, static=False), "gpu_dots", DOTS | {"threads": 32, "ahead": 4},
    ),
    "few rows in bfloat16": (
        K.linear(16, 40, 256, dtype="bfloat16"), "gpu_dots", DOTS | {"columns": 1},
    ),
    "few rows, an odd reduction": (K.linear(2, 30, 75, dtype="float16"), "gpu_dots", DOTS),
    "few rows, columns beside": (K.neighbours(4, 50, 136, dtype="float16"), "gpu_dots", DOTS),
    "few rows of bytes": (
        of_bytes(3, 40, 1040), "gpu_dots", DOTS | {"threads": 128, "ahead": 2},
    ),
    "few rows of bytes, columns beside": (of_bytes(2, 40, 200, beside=True), "gpu_dots", DOTS),
    "few rows that are computed": (
        gated(4, 50, 264, "float16"), "gpu_dots", DOTS | {"threads": 64, "along": 64},
    ),
    "few rows that are computed in bfloat16": (gated(3, 20, 128, "bfloat16"), "gpu_dots", DOTS),
    "few rows of four bits": (of_words(3, 40, 1280, 4, 64), "gpu_dots", DOTS | {"ahead": 2}),
    "few rows of four bits and offsets": (
        of_words(2, 50, 160, 4, 32, offsets=True), "gpu_dots", DOTS | {"columns": 4},
    ),
    "few rows of four bits, small groups": (
        of_words(1, 30, 72, 4, 24, offsets=True), "gpu_dots", DOTS,
    ),
    "few rows of eight bits by groups": (
        of_words(5, 40, 192, 8, 16, offsets=True), "gpu_dots", DOTS,
    ),
    "few rows, each thread computes": (
        gated(4, 8, 8192, "float16"), "gpu_dots", DOTS | {"ahead": 2},
    ),
    "few rows, asked for early": (
        K.linear(1, 70, 1032, dtype="float16"), "gpu_dots",
        DOTS | {"threads": 128, "along": 64, "columns": 4, "ahead": 2, "early": 1},
    ),
    "few rows, columns beside, asked for early": (
        K.neighbours(4, 50, 264, dtype="bfloat16"), "gpu_dots", DOTS | {"ahead": 2, "early": 1},
    ),
    "few rows of four bits, asked for early": (
        of_words(3, 40, 1280, 4, 64), "gpu_dots", DOTS | {"ahead": 2, "early": 1},
    ),
    "few rows of heads": (scores(3, 12, 64), "gpu_dots", DOTS),
    "small product of bytes": (of_bytes(3, 20, 40), "gpu_direct", {"threads": 64}),
    "product": (K.linear(64, 64, 64), "gpu_product", TINY),
    "product that does not divide": (K.linear(37, 45, 51), "gpu_product", TINY),
    "two stages": (K.linear(37, 45, 51), "gpu_product", TINY | {"stages": 2}),
    "one turn": (K.linear(37, 45, 9), "gpu_product", TINY | {"stages": 2}),
    "weights that change": (K.linear(37, 45, 51, static=False), "gpu_product", TINY),
    "scores": (K.attention_scores(3, 40, 24), "gpu_product", TINY | {"stages": 2}),
    "convolution": (K.conv(24, 9, 24, 5, 1, 2), "gpu_product", TINY | {"stages": 2}),
    "strided convolution": (K.conv(8, 15, 24, 3, 2, 1), "gpu_product", TINY),
    "grouped convolution": (K.conv(8, 9, 16, 3, 1, 1, 2), "gpu_product", TINY),
    "convolution in space": (K.conv(8, 6, 16, 3, 1, 1, rank=3), "gpu_product", TINY),
    "transposed": (K.conv_transpose(6, 7, 5, 4, 1, 1), "gpu_product", TINY),
    "transposed by phases": (K.conv_transpose(6, 7, 5, 4, 2, 1), "gpu_product", TINY),
    "half product": (K.linear(37, 45, 51, dtype="float16"), "gpu_product", TINY),
    "tensor cores": (K.linear(64, 64, 64, dtype="float16"), "gpu_product", TENSOR),
    "tensor cores that do not divide": (
        K.linear(37, 45, 51, dtype="float16"), "gpu_product", TENSOR,
    ),
    "tensor cores in bfloat16": (K.linear(128, 96, 64, dtype="bfloat16"), "gpu_product", TENSOR),
    "tensor cores, weights that change": (
        K.linear(40, 72, 64, dtype="float16", static=False), "gpu_product", TENSOR | {"tm": 16},
    ),
    "copies ahead": (
        K.linear(70, 96, 72, dtype="float16"), "gpu_product", TENSOR | {"ahead": 1},
    ),
    "copies far ahead": (
        K.linear(128, 96, 200, dtype="bfloat16"), "gpu_product",
        TENSOR | {"ahead": 1, "stages": 4},
    ),
    "fewer turns than stages": (
        K.linear(64, 64, 32, dtype="float16"), "gpu_product",
        TENSOR | {"ahead": 1, "stages": 4},
    ),
    "scores in tensor cores": (scores(2, 70, 64), "gpu_product", TENSOR | {"ahead": 1}),
    "scores, copied": (scores(2, 70, 36), "gpu_product", TENSOR),
    "weighted values": (weighted(2, 70, 64), "gpu_product", TENSOR | {"ahead": 1, "stages": 3}),
    "tf32": (rounded(K.linear(64, 64, 64)), "gpu_product", TENSOR),
    "tf32 that does not divide": (rounded(K.linear(37, 45, 51)), "gpu_product", TENSOR),
    "tf32, copies ahead": (
        rounded(K.linear(70, 96, 72)), "gpu_product", TENSOR | {"ahead": 1, "stages": 3},
    ),
    "tf32, weights that change": (
        rounded(K.linear(40, 72, 64, static=False)), "gpu_product", TENSOR | {"tm": 16},
    ),
    "tf32, scores": (
        rounded(K.attention_scores(3, 40, 24)), "gpu_product", TENSOR | {"ahead": 1},
    ),
    "tf32, convolution": (rounded(K.conv(24, 9, 24, 5, 1, 2)), "gpu_product", TENSOR),
    "gradient": (gradient(37, 45, 51, "float32"), "gpu_product", TINY),
    "gradient in float16": (gradient(72, 96, 80, "float16"), "gpu_product", TENSOR | {"ahead": 1}),
    "gradient in bfloat16": (
        gradient(70, 45, 100, "bfloat16"), "gpu_product", TENSOR | {"ahead": 1, "stages": 3},
    ),
    "gradient of a part": (
        gradient(64, 64, 64, "float16", span=77), "gpu_product", TENSOR | {"ahead": 1},
    ),
    "gradient of an aligned part": (
        gradient(64, 64, 64, "bfloat16", span=100), "gpu_product", TENSOR,
    ),
    "tf32, gradient": (
        rounded(gradient(72, 96, 80, "float32")), "gpu_product", TENSOR | {"ahead": 1},
    ),
    "planes": (planes(), "gpu_product", TINY | {"stages": 2}),
    "planes in float16": (planes("float16"), "gpu_product", TENSOR | {"ahead": 1}),
    "tf32, planes": (rounded(planes()), "gpu_product", TENSOR | {"ahead": 1, "stages": 3}),
    "split": (K.linear(37, 45, 96), "gpu_product", TINY | {"split": 2}),
    "split, copies ahead": (
        K.linear(70, 96, 256, dtype="float16"), "gpu_product",
        TENSOR | {"ahead": 1, "stages": 3, "split": 4},
    ),
    "split, fewer turns than stages": (
        K.linear(64, 64, 64, dtype="bfloat16"), "gpu_product",
        TENSOR | {"ahead": 1, "stages": 4, "split": 2},
    ),
    "split convolution": (
        K.conv(24, 9, 24, 4, 1, 1), "gpu_product", TINY | {"stages": 2, "split": 4},
    ),
    "warpgroups": (K.linear(70, 96, 200, dtype="float16"), "gpu_warpgroup", WARPGROUP),
    "warpgroups, two of them": (
        K.linear(130, 300, 320, dtype="bfloat16"), "gpu_warpgroup",
        WARPGROUP | {"bm": 128, "bn": 256, "warpgroups": 2},
    ),
    "warpgroups of two blocks of rows": (
        K.linear(130, 70, 128, dtype="float16"), "gpu_warpgroup",
        WARPGROUP | {"bm": 128, "bn": 96, "bk": 128, "stages": 3},
    ),
    "warpgroups, fewer turns than stages": (
        K.linear(20, 192, 51, dtype="float16"), "gpu_warpgroup",
        WARPGROUP | {"bn": 192, "stages": 6},
    ),
    "warpgroups, weights that change": (
        K.linear(70, 130, 200, dtype="float16", static=False), "gpu_warpgroup",
        WARPGROUP | {"bn": 128, "bk": 128, "stages": 3},
    ),
    "warpgroups, flags": (kept(70, 64), "gpu_warpgroup", WARPGROUP),
    "warpgroups, scores": (scores(2, 70, 136), "gpu_warpgroup", WARPGROUP | {"bn": 32}),
    "warpgroups, scores, copied": (scores(2, 70, 36), "gpu_warpgroup", WARPGROUP),
    "warpgroups, weighted values": (
        weighted(2, 70, 64), "gpu_warpgroup", WARPGROUP | {"bn": 128},
    ),
    "warpgroups, gradient": (
        gradient(200, 136, 80, "float16"), "gpu_warpgroup",
        WARPGROUP | {"bm": 256, "bn": 128, "warpgroups": 2},
    ),
    "warpgroups, gradient in bfloat16": (
        gradient(70, 45, 100, "bfloat16"), "gpu_warpgroup", WARPGROUP | {"bk": 128, "stages": 3},
    ),
    "warpgroups, many rows": (
        K.linear(900, 70, 64, dtype="float16"), "gpu_warpgroup", WARPGROUP | {"bn": 32},
    ),
    "warpgroups, planes": (planes("float16"), "gpu_warpgroup", WARPGROUP | {"bn": 32}),
    "warpgroups, split": (
        K.linear(70, 96, 512, dtype="float16"), "gpu_warpgroup",
        WARPGROUP | {"bn": 32, "split": 4, "stages": 3},
    ),
    "warpgroups, a cluster": (
        K.linear(70, 96, 512, dtype="float16"), "gpu_warpgroup",
        WARPGROUP | {"bn": 32, "split": 4, "stages": 3, "cluster": 1},
    ),
    "warpgroups, a cluster of eight": (
        K.linear(130, 40, 512, dtype="bfloat16"), "gpu_warpgroup",
        WARPGROUP | {"bm": 128, "bn": 32, "warpgroups": 2, "split": 8, "cluster": 1},
    ),
    "warpgroups, asked for early": (
        K.linear(130, 70, 320, dtype="bfloat16"), "gpu_warpgroup",
        WARPGROUP | {"bm": 128, "bn": 32, "warpgroups": 2, "early": 1},
    ),
    "warpgroups, lines of columns asked for early": (
        K.linear(70, 130, 200, dtype="float16"), "gpu_warpgroup",
        WARPGROUP | {"pack": 0, "split": 2, "early": 1},
    ),
    "warpgroups, lines of positions asked for early": (
        K.neighbours(70, 96, 200, dtype="float16"), "gpu_warpgroup",
        WARPGROUP | {"pack": 0, "bn": 64, "early": 1},
    ),
    "warpgroups, a cluster, asked for early": (
        K.linear(70, 96, 512, dtype="float16"), "gpu_warpgroup",
        WARPGROUP | {"bn": 32, "split": 4, "stages": 5, "cluster": 1, "early": 1},
    ),
    "attention": (attention(Case(dtype="float16")), "gpu_attention", ATTENTION),
    "attention, several turns": (
        attention(Case(dtype="float16", queries=70, keys=200, depth=64, width=64)),
        "gpu_attention", ATTENTION | {"bm": 64, "bn": 64},
    ),
    "attention, copies ahead": (
        attention(Case(dtype="float16", queries=70, keys=200, depth=64, width=64)),
        "gpu_attention", {"bm": 32, "bn": 80, "ahead": 1, "stages": 2},
    ),
    "attention, one turn copied ahead": (
        attention(Case(dtype="bfloat16", queries=33, keys=60, depth=64, width=64, mask="bool")),
        "gpu_attention", {"bm": 16, "bn": 64, "ahead": 1, "stages": 1},
    ),
    "attention, causal, copies ahead": (
        attention(Case(dtype="float16", queries=100, keys=100, causal=True)), "gpu_attention",
        {"bm": 16, "bn": 48, "ahead": 1, "stages": 2},
    ),
    "attention, causal": (
        attention(Case(dtype="float16", queries=100, keys=100, causal=True)), "gpu_attention",
        ATTENTION,
    ),
    "attention, masked": (
        attention(Case(dtype="float16", mask="bool", guard=True)), "gpu_attention", ATTENTION,
    ),
    "attention, a mask for each head": (
        attention(Case(dtype="float16", mask="heads")), "gpu_attention", ATTENTION,
    ),
    "attention in bfloat16": (
        attention(Case(dtype="bfloat16", kv=2)), "gpu_attention", ATTENTION,
    ),
    "attention, flat": (
        attention(Case(dtype="float16", depth=24, width=20, flat=True)), "gpu_attention",
        ATTENTION | {"bm": 16},
    ),
    "attention, keys shared": (
        attention(Case(dtype="float16", queries=1, keys=256, depth=64, width=64)),
        "gpu_attention", {"bm": 16, "bn": 32, "ahead": 1, "stages": 2, "split": 4},
    ),
    "attention, keys shared by a block for each turn": (
        attention(Case(dtype="float16", queries=20, keys=150, width=20, mask="bool", guard=True)),
        "gpu_attention", {"bm": 32, "bn": 32, "ahead": 0, "stages": 1, "split": 5},
    ),
    "attention in bfloat16, keys shared": (
        attention(Case(dtype="bfloat16", queries=3, keys=180, kv=2, mask="heads")),
        "gpu_attention", {"bm": 16, "bn": 32, "ahead": 1, "stages": 2, "split": 3},
    ),
    "attention, heads of the same keys": (
        attention(Case(dtype="float16", queries=3, keys=96, heads=6, kv=2, mask="heads")),
        "gpu_attention", {"bm": 16, "bn": 32, "ahead": 1, "stages": 2, "split": 1, "heads": 3},
    ),
    "attention, heads of the same keys, shared": (
        attention(Case(dtype="bfloat16", queries=5, keys=130, heads=8, kv=2, mask="bool")),
        "gpu_attention", {"bm": 16, "bn": 48, "ahead": 0, "stages": 1, "split": 3, "heads": 4},
    ),
    "tiles of bytes": (of_bytes(70, 96, 200), "gpu_product", TENSOR),
    "tiles of bytes, columns beside": (
        of_bytes(70, 45, 96, beside=True), "gpu_product", TENSOR | {"ahead": 1, "stages": 3},
    ),
    "tiles of four bits": (of_words(70, 96, 256, 4, 64), "gpu_product", TENSOR | {"ahead": 1}),
    "tiles of four bits and offsets, split": (
        of_words(40, 50, 128, 4, 32, offsets=True), "gpu_product",
        TENSOR | {"stages": 1, "split": 2},
    ),
    "tiles of eight bits by groups in bfloat16": (
        of_words(33, 40, 176, 8, 16, dtype="bfloat16"), "gpu_product", TENSOR | {"bm": 32},
    ),
    "weights where they lie": (
        K.linear(70, 96, 72, dtype="float16"), "gpu_product",
        TENSOR | {"ahead": 1, "stages": 3, "pack": 0},
    ),
    "weights where they lie, columns beside": (
        K.neighbours(70, 96, 72, dtype="bfloat16"), "gpu_product",
        TENSOR | {"ahead": 1, "split": 1, "pack": 0},
    ),
    "tf32, weights where they lie": (
        rounded(K.linear(70, 96, 72)), "gpu_product", TENSOR | {"ahead": 1, "pack": 0},
    ),
    "warpgroups, bytes": (of_bytes(70, 130, 200), "gpu_warpgroup", WARPGROUP),
    "warpgroups, four bits and offsets": (
        of_words(130, 90, 256, 4, 32, offsets=True, dtype="bfloat16"), "gpu_warpgroup",
        WARPGROUP | {"bm": 128, "bn": 96, "bk": 128, "stages": 3, "warpgroups": 2},
    ),
    "warpgroups, eight bits by groups, a cluster": (
        of_words(70, 96, 512, 8, 20), "gpu_warpgroup",
        WARPGROUP | {"bn": 32, "split": 4, "stages": 3, "cluster": 1},
    ),
    "warpgroups, weights where they lie": (
        K.linear(70, 130, 200, dtype="float16"), "gpu_warpgroup", WARPGROUP | {"pack": 0},
    ),
    "warpgroups, weights where they lie, columns beside": (
        K.neighbours(70, 96, 512, dtype="float16"), "gpu_warpgroup",
        WARPGROUP | {"split": 4, "stages": 3, "cluster": 1, "pack": 0},
    ),
    "more shared memory": (
        K.linear(300, 256, 256, dtype="float16"), "gpu_product",
        {"bm": 256, "bn": 128, "bk": 64, "tm": 64, "tn": 64, "stages": 3, "tensor": 1, "ahead": 1},
    ),
}  # fmt: skip
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}


def tolerance(spec: Graph) -> float:
    if any(is_tf32(node) for node in spec.nodes):
        return TOLERANCE["float16"]  # the same mantissa
    return TOLERANCE.get(spec.nodes[spec.inputs[0]].dtype, 1e-9)  # whole numbers: none


NAMES = [pytest.param(name, id=name.replace(" ", "-")) for name in CASES]


def test_what_runs_under_the_sanitizer_is_among_them() -> None:
    script = (Path(__file__).parents[2] / "benchmarks" / "gpu" / "run.sh").read_text()
    found = re.search(r"for name in (.*?); do\n\s+checked", script, re.DOTALL)
    assert found is not None
    names = found[1].replace("\\\n", " ").split()
    assert len(names) == 10
    assert {*names} <= {name.replace(" ", "-") for name in CASES}


@pytest.mark.sampled(12)  # ``test_gpu_emulated`` runs the text of the same kernels
@pytest.mark.parametrize("name", NAMES)
def test_numbers_on_the_host(name: str) -> None:
    spec, sketch, decisions = CASES[name]
    assert error(spec, sketch, decisions) < tolerance(spec)


def test_nan_and_ties_of_argmax() -> None:
    spec = arg("argmax", 3, 100)
    x = np.zeros((3, 100), np.float32)
    x[0, [40, 70]] = 5.0  # the first of equals
    x[1, [10, 90]] = np.nan  # the first NaN, more than any number
    kernel = schedule(spec, "gpu_rows", {"threads": 64}, host=True)
    given, out = aligned((3, 100), "float32"), aligned((3,), "int64")
    given[...] = x
    compile_kernel(kernel, TargetSpec.detect(1)).bind([given, out])()
    assert out.tolist() == [40, 10, 0]


def _newer(case: tuple[Graph, str, dict[str, int]]) -> bool:
    """Whether a kernel needs compute capability 8.0."""
    spec, _, decisions = case
    rounds = decisions.get("tensor") and any(is_tf32(node) for node in spec.nodes)
    newer = decisions.get("ahead") or spec.nodes[spec.inputs[0]].dtype == "bfloat16"
    return bool(rounds or newer)


def built_for(case: tuple[Graph, str, dict[str, int]], arch: str) -> bool:
    """Whether a kernel can be built for an architecture."""
    if case[1] == "gpu_warpgroup":
        return arch == "sm_90a"
    return arch != "sm_75" or not _newer(case)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_every_kernel_becomes_machine_code(arch: str) -> None:
    """All in one source, as a network's are."""
    if not nvrtc.available():
        pytest.skip("NVRTC or CUDA's headers are not installed: pip install nvidia-cuda-nvrtc ...")
    kernels = {
        f"k{n}": schedule(*case) for n, case in enumerate(CASES.values()) if built_for(case, arch)
    }
    source, launches = cuda_source(kernels, arch)
    assert {name.partition("/")[0] for name in launches} == kernels.keys()
    cubin, log = nvrtc.compile_cubin(source, arch)
    assert cubin.startswith(b"\x7fELF")
    assert "error" not in log
    assert "are serialized" not in log  # of wgmma: tensor cores would wait for each other


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMES)
def test_numbers_on_the_card(name: str) -> None:
    """The same cases on the GPU at hand, through the driver, on another stream than the default."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    if not built_for(CASES[name], arch if (major, minor) >= (8, 0) else "sm_75"):
        pytest.skip("needs a later compute capability, or 9.0 alone")
    spec, sketch, decisions = CASES[name]
    arrays = K.inputs_for(spec)
    expected = evaluate(spec, arrays)
    kernel = schedule(spec, sketch, decisions)
    source, launches = cuda_source({"k": kernel}, arch)
    image, _ = nvrtc.compile_cubin(source, arch)
    count = len(kernel.inputs) + len(kernel.outputs) + len(kernel.scratch)
    places = [Place(i) for i in range(count)]
    calls = {"main": [(name, places) for name in launches_of("k", launches)]}
    program = GpuProgram(arch, (image,), launches, calls)
    stream = torch.cuda.Stream()
    driver = CudaDriver(lambda: int(stream.cuda_stream))
    with torch.cuda.stream(stream):
        packed = [a if p is None else p.pack(a) for a, p in zip(arrays, kernel.packs, strict=True)]
        flat = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in packed]
        given = [torch.from_numpy(a).cuda() for a in flat]
        outputs = K.prepared_outputs(spec, kernel, arrays)
        held = [o.reshape(-1).view(np.uint8) for o in outputs]
        made = [torch.from_numpy(h).cuda() for h in held]
        scratch = [torch.empty(s.nbytes, dtype=torch.uint8, device="cuda") for s in kernel.scratch]
        table = (ctypes.c_int64 * count)(*(t.data_ptr() for t in (*given, *made, *scratch)))

        def run() -> None:
            (entry,) = load_gpu_program(program.to_bytes(), ["main"], driver)
            entry(ctypes.addressof(table))

        with ThreadPoolExecutor(1) as fresh:  # its first work on the device is ours
            fresh.submit(run).result()
    stream.synchronize()
    for out, raw in zip(outputs, made, strict=True):
        out.reshape(-1).view(np.uint8)[...] = raw.cpu().numpy()
    assert K.error(outputs, expected) < tolerance(spec)
