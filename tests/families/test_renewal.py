"""Writing memory anew changes no byte of it, whatever its size."""

from __future__ import annotations

import numpy as np
import pytest

from torch_pruner.codegen.build.renewal import renewer
from torch_pruner.target import TargetSpec
from torch_pruner.tuner.measure import check

pytestmark = pytest.mark.tvm


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_values_stay(threads: int) -> None:
    bind = renewer(TargetSpec.detect(2), threads)
    shapes = [((1,), "float32"), ((16,), "int64"), ((7, 33), "float32"), ((1000, 129), "uint8")]
    arrays = [check.aligned(*s) for s in shapes]
    rng = np.random.default_rng(0)
    for array in arrays:
        array.reshape(-1).view(np.uint8)[...] = rng.integers(0, 256, array.nbytes, np.uint8)
    before = [a.tobytes() for a in arrays]
    bind(arrays)()
    assert [a.tobytes() for a in arrays] == before


def test_it_writes() -> None:
    """Not being allowed to is noticed: a compiler that left out the stores would not be."""
    from torch_pruner.codegen.build.lower import compile_module
    from torch_pruner.codegen.build.renewal import _program
    from torch_pruner.codegen.tir.builders import tvm

    target = TargetSpec.detect(2)
    module = tvm.IRModule({tvm.ir.GlobalVar("renew"): _program(2)})
    text = compile_module(module, target).inspect_source("ll")
    assert "store <" in text or "llvm.memcpy" in text or "llvm.memmove" in text
