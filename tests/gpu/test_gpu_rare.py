"""What CPUs compute in a branch for all lanes of a vector becomes CUDA C, too."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.triton_cases import task_of
from torch_pruner import families
from torch_pruner.codegen.build.gpu.source import cuda_source
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.task import Candidate

pytestmark = pytest.mark.tvm


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("op", ["sin", "cos", "tan", "fmod"])
def test_every_width_of_vectors_is_printed(op: str, dtype: str) -> None:
    b = GraphBuilder()
    x, y = (b.input(i, (64, 96), dtype) for i in range(2))
    spec = b.finish([b.pointwise(op, x, y) if op == "fmod" else b.pointwise(op, x)])
    task = task_of(spec)
    family = families.named("gpu_elementwise")
    sketch = family.space()(task)
    point = np.atleast_2d(sketch.best_predicted())[0]
    at = sketch.names.index("vl")
    assert len(sketch.domains[at]) > 1
    for width in sketch.domains[at]:
        point[at] = width
        candidate = Candidate(sketch.name, tuple(sorted(sketch.named(point).items())))
        kernel = family.schedule(spec, candidate, task.target)
        text, _ = cuda_source({"kernel": kernel}, "sm_90")
        assert "kernel" in text
        assert "llvm" not in text
