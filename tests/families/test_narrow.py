"""bfloat16 and float16 on processors that compute on neither: what is read, summed and rounded."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from tests.unit.graph.attention_graphs import Case, attention
from torch_pruner.codegen.build.lower import aligned, compile_kernel
from torch_pruner.compiler.drafting import draft
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate, numpy_dtype
from torch_pruner.target import CpuProbe, TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

AVX2 = {"kind": "llvm", "mcpu": "haswell"}
AVX512 = {"kind": "llvm", "mcpu": "skylake-avx512", "mattr": ["-prefer-256-bit"]}  # no AVX512-BF16
FLAGS = CpuProbe.read().flags
TARGETS = {
    name: TargetSpec.from_dict(target, 2)
    for name, target, needed in (("avx2", AVX2, {"avx2", "f16c"}), ("avx512", AVX512, {"avx512vl"}))
    if needed <= FLAGS
}
if TargetSpec.detect(2).float16:
    TARGETS["here"] = TargetSpec.detect(2)
NARROW = ("bfloat16", "float16")
BOUND = {"bfloat16": 1e-2, "float16": 1.5e-3}  # of the largest result: 8 and 11 bits
EVERY = list(product(TARGETS, NARROW))


def run(spec: Graph, arrays: Sequence[K.Array], target: TargetSpec) -> list[K.Array]:
    """Outputs of the kernel that is drafted for a target."""
    candidate = draft(Task("kernel", spec, target, 2))
    kernel = schedule(spec, candidate.sketch, dict(candidate.decisions))
    given = []
    for array, pack in zip(arrays, kernel.packs, strict=True):
        value = array if pack is None else pack.pack(array)
        given.append(aligned(value.shape, str(value.dtype)))
        given[-1][...] = value
    outputs = [aligned(o.shape, o.dtype) for o in kernel.outputs]
    compile_kernel(kernel, target).bind([*given, *outputs])()
    return outputs


def cast(shape: tuple[int, ...], *dtypes: str) -> Graph:
    b = GraphBuilder()
    x = b.input(0, shape, dtypes[0])
    for dtype in dtypes[1:]:
        x = b.pointwise("cast", x, dtype=dtype)
    return b.finish([x])


def difficult() -> K.Array:
    """Float32s at and beside every border: ties, overflow, denormals of either type, NaN."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 1 << 14, dtype=np.uint32)
    ties = np.arange(1 << 16, dtype=np.uint32)[::5] << 16 | 0x8000
    near = np.concatenate([ties, ties - 1, ties + 1])
    halves = rng.integers(0, 2**16, 1 << 13).astype(np.uint16).view(np.float16).astype(np.float32)
    steps = halves.view(np.uint32)[:, None] + np.array([-1, 0, 1, 0xFFF, 0x1000, 0x1001])
    every = np.concatenate([bits, near, steps.astype(np.uint32).ravel()])
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, -65536, 2.0**-24, 2.0**-25]
    edges += [2.0**-14, 3.38953139e38, 3.3961775e38, 1e-45, 9.2e-41, 1.1754944e-38]
    every = np.concatenate([every.view(np.float32), np.array(edges, np.float32)])
    array = aligned((len(every),), "float32")
    array[...] = every
    return array


def same_bits(got: K.Array, expected: K.Array) -> None:
    """Equal, zeros by their sign, and NaN where NaN is expected."""
    a, b = got.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    held = ~np.isnan(a)
    np.testing.assert_array_equal(a[held].view(np.uint32), b[held].view(np.uint32))


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_every_narrow_number_is_read_exactly(name: str, dtype: str) -> None:
    x = aligned((1 << 16,), dtype)
    x[...] = np.arange(1 << 16).astype(np.uint16).view(numpy_dtype(dtype))
    for dtypes in ((dtype, "float32"), (dtype, "float32", dtype)):
        (got,) = run(cast(x.shape, *dtypes), [x], TARGETS[name])
        same_bits(got, x.astype(np.float32))


@pytest.mark.parametrize(("name", "dtype"), EVERY)
@pytest.mark.parametrize("wide", [False, True], ids=["stored", "kept"])
def test_rounding_is_to_nearest_even(name: str, dtype: str, wide: bool) -> None:
    x = difficult()
    dtypes = ("float32", dtype, "float32") if wide else ("float32", dtype)
    (got,) = run(cast(x.shape, *dtypes), [x], TARGETS[name])
    with np.errstate(all="ignore"):
        same_bits(got, x.astype(numpy_dtype(dtype)))


KERNELS = {
    "linear": lambda dtype: K.linear(20, 96, 64, dtype=dtype),
    "many rows": lambda dtype: K.linear(130, 72, 300, dtype=dtype),
    "one row": lambda dtype: K.linear(1, 96, 64, dtype=dtype),
    "columns adjacent": lambda dtype: K.neighbours(1, 96, 64, dtype=dtype),
    "rows and columns": lambda dtype: K.neighbours(40, 96, 64, dtype=dtype),
    "not constant": lambda dtype: K.linear(33, 40, 64, static=False, dtype=dtype),
    "attention": lambda dtype: attention(Case(dtype=dtype, mask="add", kv=2)),
    "causal": lambda dtype: attention(Case(dtype=dtype, causal=True, queries=64, keys=64)),
}


@pytest.mark.parametrize(("name", "dtype"), EVERY)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels(kernel: str, name: str, dtype: str) -> None:
    spec = KERNELS[kernel](dtype)
    arrays = K.inputs_for(spec)
    assert K.error(run(spec, arrays, TARGETS[name]), evaluate(spec, arrays)) < BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype"), EVERY)
@pytest.mark.parametrize("rows", [1, 24])
def test_sums_are_float32(rows: int, name: str, dtype: str) -> None:
    """2048 times 1 is lost in bfloat16 from 256 on, and in float16 from 2048 on."""
    b = GraphBuilder()
    x, w = b.input(0, (rows, 4096), dtype), b.input(1, (32, 4096), dtype, static=True)
    spec = b.finish([b.pointwise("mul", b.matmul(x, b.permute(w, (1, 0))), b.const(0.25, dtype))])
    ones = [np.ones(spec.nodes[i].shape, numpy_dtype(dtype)) for i in spec.inputs]
    (got,) = run(spec, ones, TARGETS[name])
    assert (got.astype(np.float32) == 1024).all()
