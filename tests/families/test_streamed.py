"""Results that no cache holds: written past the caches where whole lines are, and still right."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.families import kernels as K
from tests.families.test_isa import assembly
from torch_pruner import families
from torch_pruner.codegen.build.lower import aligned, compile_kernel
from torch_pruner.codegen.tir.builders import S, buffer, imm
from torch_pruner.codegen.tir.streamed import streamed
from torch_pruner.compiler.drafting import drafts
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, Task

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

pytestmark = pytest.mark.tvm

LARGE = 1 << 40  # bytes: as if the last cache held everything
KERNELS = {
    "linear": K.linear(33, 96, 64),
    "convolution": K.conv(16, 10, 48, 5, 1, 2),
    "minimal filtering": K.conv(32, 20, 32, 3, 1, 1),
    "planes": K.planar(8, (16, 16), 12, (3, 3), 1, 1, residual=True),
    "depthwise": K.conv(32, 10, 32, 3, 1, 1, 32),
    "softmax": K.softmax((4, 9, 80)),
    "layer norm": K.layer_norm((3, 5, 64)),
    "pooling": K.max_pool(8, 16),
}


def candidates(spec: Graph, target: TargetSpec) -> list[Candidate]:
    return [candidate for _, candidate in drafts(Task("kernel", spec, target, 2))]


def written(spec: Graph, candidate: Candidate, target: TargetSpec) -> str:
    return assembly(families.named(candidate.sketch).schedule(spec, candidate, target), target)


@pytest.mark.parametrize("name", KERNELS)
def test_results_past_the_caches_are_right(name: str) -> None:
    spec, target = KERNELS[name], replace(TargetSpec.detect(2), l3_bytes=64)
    inputs = K.inputs_for(spec)
    expected = evaluate(spec, inputs)
    for candidate in candidates(spec, target):
        kernel = families.named(candidate.sketch).schedule(spec, candidate, target)
        given = []
        for array, pack in zip(inputs, kernel.packs, strict=True):
            packed = array if pack is None else pack.pack(array)
            given.append(aligned(packed.shape, str(packed.dtype)))
            given[-1][...] = packed
        outputs = [aligned(o.shape, o.dtype) for o in kernel.outputs]
        compile_kernel(kernel, target).bind([*given, *outputs])()
        assert K.error(outputs, expected) < 1e-4


@pytest.mark.parametrize("name", ["linear", "minimal filtering", "planes", "depthwise"])
def test_lines_go_past_the_caches_where_a_result_is_larger(name: str) -> None:
    target = TargetSpec.from_dict({"kind": "llvm", "mcpu": "znver4"}, 2)
    spec = KERNELS[name]
    candidate = candidates(spec, target)[0]
    few, many = (written(spec, candidate, replace(target, l3_bytes=size)) for size in (64, LARGE))
    assert "vmovntps" in few
    assert "sfence" in few
    assert "vmovntps" not in many
    assert "sfence" not in many


def test_halves_of_lines_are_stored_as_ever() -> None:
    target = replace(TargetSpec.from_dict({"kind": "llvm", "mcpu": "haswell"}, 2), l3_bytes=64)
    spec = KERNELS["linear"]
    assert "vmovnt" not in written(spec, candidates(spec, target)[0], target)


def test_what_a_kernel_reads_again_stays_in_the_caches() -> None:
    out, other = buffer(64, "float32", "out0"), buffer(64, "float32", "in0")
    adds = S.BufferStore(out, out[imm(0)] + other[imm(0)], [imm(0)])
    copies = S.BufferStore(out, other[imm(0)], [imm(0)])
    assert streamed(adds, [out]).same_as(adds)
    assert not streamed(copies, [out]).same_as(copies)
