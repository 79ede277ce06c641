"""The passes that our kernels go through give the machine code of TVM's own pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.families import kernels as K
from torch_pruner import families
from torch_pruner.codegen.build import lower
from torch_pruner.codegen.tir.builders import IRModule, tvm
from torch_pruner.compiler.drafting import draft
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from pathlib import Path

    from torch_pruner.graph.ir import Graph

pytestmark = pytest.mark.tvm

TVMS = {"tirx.disable_storage_rewrite": True, "tirx.disable_cse_tir": True}


@pytest.mark.parametrize(
    "spec",
    [K.linear(40, 50, 70), K.conv(16, 12, 16, 3, 1, 1), K.softmax((24, 100)), K.max_pool(8, 16)],
    ids=["linear", "convolution", "softmax", "pool"],
)
def test_passes_that_are_left_out_change_nothing(
    spec: Graph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = TargetSpec.detect(2)
    candidate = draft(Task("t", spec, target, 2))
    kernel = families.named(candidate.sketch).schedule(spec, candidate, target)
    count = len(kernel.inputs) + len(kernel.outputs) + len(kernel.scratch)
    call = KernelCall("kernel", tuple(Place(i) for i in range(count)))

    def code(name: str) -> bytes:
        module = lower.program_module({"kernel": kernel}, {"main": [call]}, count)
        lower.compile_module(module, target).write_to_file(str(tmp_path / name), "o")
        return (tmp_path / name).read_bytes()

    ours = code("ours.o")
    build = tvm.tirx.build

    def as_tvm_does(module: IRModule, its: object, _pipeline: str) -> object:
        with tvm.transform.PassContext(config=TVMS):
            return build(module, its)

    monkeypatch.setattr(tvm.tirx, "build", as_tvm_does)
    assert code("theirs.o") == ours
