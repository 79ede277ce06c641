"""The same sketches for other instruction sets: AVX2 runs here, AArch64 code is only looked at."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from tests.unit.graph.attention_graphs import Case, attention
from tests.unit.tuner import graphs_by_kind as G
from torch_pruner import families
from torch_pruner.codegen.build.lower import (
    aligned,
    compile_kernel,
    compile_module,
    program_module,
)
from torch_pruner.compiler.drafting import draft
from torch_pruner.families import sketches_for
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import CpuProbe, TargetSpec
from torch_pruner.task import Candidate, Task

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import ScheduledKernel
    from torch_pruner.graph.ir import Graph

pytestmark = pytest.mark.tvm

AVX2 = TargetSpec.from_dict({"kind": "llvm", "mcpu": "haswell"}, 2)
NEON = TargetSpec.from_dict({"kind": "llvm", "mtriple": "aarch64-linux-gnu"}, 2)
KERNELS = {
    "linear": K.linear(20, 96, 64),
    "one row": K.linear(1, 96, 64),
    "few rows": K.linear(4, 72, 50),
    "one row, columns adjacent": K.neighbours(1, 96, 64),
    "convolution": K.conv(16, 10, 24, 5, 1, 2),
    "minimal filtering": K.conv(32, 20, 32, 3, 1, 1),
    "depthwise": K.conv(24, 10, 24, 3, 1, 1, 24),
    "softmax": K.softmax((4, 9, 70)),
    "layer norm": K.layer_norm((3, 5, 64)),
    "pooling": K.max_pool(8, 16),
    "pooling along lines": G.located_pooling(),
    "attention": attention(Case(mask="add", causal=True, kv=2)),
    "bfloat16": K.linear(20, 96, 64, dtype="bfloat16"),
}


def drafted(spec: Graph, target: TargetSpec) -> ScheduledKernel:
    """The kernel that is taken for ``target`` when nothing is measured."""
    candidate = draft(Task("kernel", spec, target, 2))
    return schedule(spec, candidate.sketch, dict(candidate.decisions))


def assembly(kernel: ScheduledKernel, target: TargetSpec) -> str:
    count = len(kernel.inputs) + len(kernel.outputs) + len(kernel.scratch)
    calls = [KernelCall("kernel", tuple(Place(i) for i in range(count)))]
    module = program_module({"kernel": kernel}, {"main": calls}, count)
    text: str = compile_module(module, target).inspect_source("asm")
    return text


def here(*flags: str) -> bool:
    probe = CpuProbe.read()
    return probe.machine == "x86_64" and {*flags} <= set(probe.flags)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.skipif(not here("avx2", "fma"), reason="this CPU has no AVX2")
def test_avx2_is_right(name: str) -> None:
    spec = KERNELS[name]
    kernel = drafted(spec, AVX2)
    arrays = K.inputs_for(spec)
    expected = evaluate(spec, arrays)
    given = []
    for array, pack in zip(arrays, kernel.packs, strict=True):
        value = array if pack is None else pack.pack(array)
        given.append(aligned(value.shape, str(value.dtype)))
        given[-1][...] = value
    outputs = [aligned(o.shape, o.dtype) for o in kernel.outputs]
    compile_kernel(kernel, AVX2).bind([*given, *outputs])()
    assert K.error(outputs, expected) < (1e-2 if name == "bfloat16" else 1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_avx2_code_keeps_to_its_registers(name: str) -> None:
    text = assembly(drafted(KERNELS[name], AVX2), AVX2)
    assert "%ymm" in text
    assert "%zmm" not in text


@pytest.mark.parametrize("name", KERNELS)
def test_aarch64_code_is_vectorised(name: str) -> None:
    text = assembly(drafted(KERNELS[name], NEON), NEON)
    assert re.search(r"\bf(mla|mul|cmg[te])\s+v\d+\.4s", text)


def test_a_tile_uses_the_registers_that_there_are() -> None:
    """A linear layer's register tile grows with the register file and has the target's lanes."""
    spec = K.linear(128, 768, 256)
    for target, lanes in ((AVX2, 8), (NEON, 4)):
        decisions = dict(draft(Task("kernel", spec, target, 2)).decisions)
        assert decisions["vl"] == lanes
        assert decisions["tm"] * decisions["nv"] < target.vector_registers


@pytest.mark.parametrize("name", ["in_place", "axpy", "coded_rows", "int4_rows", "contraction"])
def test_weights_of_few_rows_are_fetched_past_the_caches_where_asked(name: str) -> None:
    spec = {
        "in_place": G.few_rows(1, 96, 256),
        "axpy": G.matmul(1, 96, 256),
        "coded_rows": G.coded_rows(),
        "int4_rows": G.int4(2),
        "contraction": G.few_rows(4, 96, 256),
    }[name]
    target = TargetSpec.from_dict({"kind": "llvm", "mcpu": "znver4"}, 2)
    sketch = next(s for s in sketches_for(Task("kernel", spec, target, 2)) if s.name == name)
    family, point = families.named(name), dict(sketch.named(sketch.default()))
    fetching = {"axpy": 1, "in_place": 8192, "contraction": 1}  # which drafts do not do here
    if name in fetching:
        point["ahead"] = fetching[name]
    candidate = Candidate(name, tuple(sorted(point.items())))
    kept, past = (
        assembly(family.schedule(spec, candidate, target, past_caches=past), target)
        for past in (False, True)
    )
    assert "prefetcht0" in kept
    assert "prefetchnta" not in kept
    assert "prefetchnta" in past
    assert "prefetcht0" not in past
