"""Products with weights of twelve bits give the bits that products with sixteen give."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.families import kernels as K
from torch_pruner.codegen.build.lower import aligned, compile_kernel
from torch_pruner.compiler.drafting import draft
from torch_pruner.families import named, sketches_for
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import numpy_dtype
from torch_pruner.target import CpuProbe, TargetSpec
from torch_pruner.task import Candidate, Task

if TYPE_CHECKING:
    from torch_pruner.families.space import Sketch

pytestmark = pytest.mark.tvm

SHUFFLES = {"haswell": "avx2", "skylake-avx512": "avx512bw"}
"""Processors whose vectors look up bytes, and what this one needs to run their code."""


def for_cpu(mcpu: str) -> TargetSpec:
    return TargetSpec.from_dict({"kind": "llvm", "mcpu": mcpu}, 2)


def product(rows: int, columns: int, depth: int, *, coded: bool = True) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (rows, depth), "float32")
    w = b.input(1, (columns, depth), "bfloat16", static=True, coded=coded)
    total = b.append("matmul", (x, b.permute(w, (1, 0))), (rows, columns), "float32")
    return b.finish([b.pointwise("relu", total)])


def weights(columns: int, depth: int) -> np.ndarray:
    """Normal numbers; the beginnings of two columns are any small ones, of another special ones."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((columns, depth)).astype(np.float32)
    words = (values.view(np.uint32) >> 16).astype(np.uint16)
    words[::48, :64] = rng.integers(0, 1 << 16, words[::48, :64].shape) & 0xBFFF
    words[1, :6] = (0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0)
    return words.view(numpy_dtype("bfloat16"))


def run(
    spec: Graph, family: str, point: dict[str, int], weight: np.ndarray, target: TargetSpec
) -> np.ndarray:
    kernel = named(family).schedule(spec, Candidate(family, tuple(sorted(point.items()))), target)
    x, _ = K.inputs_for(spec)
    pack = kernel.packs[1]
    laid = weight if pack is None else pack.pack(weight)
    given = aligned(laid.shape, "bfloat16")
    given[...] = laid
    out = aligned(kernel.outputs[0].shape, "float32")
    compile_kernel(kernel, target).bind([x, given, out])()
    result: np.ndarray = out.view(np.uint32)
    return result


def sketch_of(spec: Graph, target: TargetSpec) -> Sketch | None:
    found = sketches_for(Task("product", spec, target, target.cores))
    return next((s for s in found if s.name == "coded_rows"), None)


@pytest.mark.parametrize("mcpu", SHUFFLES)
@pytest.mark.parametrize(("rows", "depth"), [(1, 272), (2, 4352), (3, 144)])
def test_equal_decisions_give_equal_bits(mcpu: str, rows: int, depth: int) -> None:
    """Blocks that are whole and cut, patched and not."""
    if SHUFFLES[mcpu] not in CpuProbe.read().flags:
        pytest.skip(f"no {SHUFFLES[mcpu]} here")
    spec, target = product(rows, 50, depth), for_cpu(mcpu)
    sketch = sketch_of(spec, target)
    if rows > 1 and mcpu == "haswell":
        assert sketch is None, "sums of more rows do not fit its registers"
        return
    assert sketch is not None
    weight = weights(50, depth)
    for point in K.points(sketch, 2):
        got = run(spec, "coded_rows", point, weight, target)
        assert np.array_equal(got, run(spec, "in_place", point, weight, target)), point
    assert np.isnan(got.view(np.float32)).any()
    assert np.isfinite(got.view(np.float32)).any()


def test_every_number_that_there_is() -> None:
    """A row of zeros and a one picks them, one after another: 65 280 that are finite."""
    every = np.arange(1 << 16, dtype=np.uint16)
    finite = every[(every & 0x7F80) != 0x7F80].reshape(-1, 128)
    weight = np.full((8 * len(finite), 128), 0x3F80, np.uint16)
    weight[::8] = finite
    spec, target = product(1, len(weight), 128), TargetSpec.detect(2)
    if (sketch := sketch_of(spec, target)) is None:
        pytest.skip("bytes are not looked up here")
    point = dict(sketch.named(sketch.default()))
    kernel = named("coded_rows").schedule(
        spec, Candidate("coded_rows", tuple(sorted(point.items()))), target
    )
    built = compile_kernel(kernel, target)
    pack = kernel.packs[1]
    assert pack is not None
    laid = pack.pack(weight.view(numpy_dtype("bfloat16")))
    given, x = aligned(laid.shape, "bfloat16"), aligned((1, 128), "float32")
    given[...] = laid
    out = aligned((1, len(weight)), "float32")
    call = built.bind([x, given, out])
    for k in range(128):
        x[...] = 0
        x[0, k] = 1
        call()
        expected = np.maximum((weight[:, k].astype(np.uint32) << 16).view(np.float32), 0)
        assert np.array_equal(out[0], expected)


def test_whom_it_is_for() -> None:
    """Weights that are known to code, vectors that look up bytes, and whole vectors of a column."""
    spec = product(1, 96, 256)
    for mcpu in SHUFFLES:
        assert sketch_of(spec, for_cpu(mcpu)) is not None
        assert sketch_of(product(1, 96, 256, coded=False), for_cpu(mcpu)) is None
        assert sketch_of(product(1, 96, 260), for_cpu(mcpu)) is None
        assert sketch_of(product(24, 96, 256), for_cpu(mcpu)) is None
    neon = TargetSpec.from_dict({"kind": "llvm", "mtriple": "aarch64-linux-gnu"}, 2)
    for target in (for_cpu("nehalem"), neon):
        assert sketch_of(spec, target) is None
        assert draft(Task("product", spec, target, 2)).sketch != "coded_rows"


def test_memory_decides() -> None:
    """Of a large weight a row is drafted with twelve bits."""
    found = draft(Task("product", product(1, 3072, 768), for_cpu("znver4"), 2))
    assert found.sketch == "coded_rows"
