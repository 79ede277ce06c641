"""Kernels for other processors run under emulation, a few here: ``tests.suites.emulated``."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulation.cases import Kernel
from tests.emulation.machines import MACHINES
from tests.suites import emulated
from tests.unit.tuner import graphs_by_kind as G
from torch_pruner.graph.ir import GraphBuilder

pytestmark = pytest.mark.tvm


def product() -> Kernel:
    """Rows that fill no tile and columns that fill no vector, with a function after the sum."""
    b = GraphBuilder()
    x, w = b.input(0, (5, 33), "float32"), b.input(1, (33, 18), "float32", static=True)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape in ((5, 33), (33, 18))]
    return Kernel(b.finish([b.pointwise("tanh", b.matmul(x, w))]), arrays, "contraction")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["neon", "sve", "riscv64"])
def test_a_product_runs_elsewhere(name: str) -> None:
    machine = MACHINES[name]
    if problem := machine.problem():
        pytest.skip(problem)
    found = emulated.Found()
    emulated.run_kernel(machine, product(), 1, found)
    assert not found.wrong
    assert found.ran == 2


def test_what_differs_is_told() -> None:
    kernel = Kernel(G.pointwise((2, 3)), [])
    right = np.array([[1.0, -np.inf, np.nan], [0.5, 0.0, 2.0]], np.float32)
    assert emulated.difference([right], [right.copy()], kernel) == 0
    for at in ((0, 0), (0, 1), (0, 2), (1, 1)):
        wrong = right.copy()
        wrong[at] = 0.9
        with pytest.raises(AssertionError):
            emulated.difference([wrong], [right], kernel)
