"""The text that goes to NVRTC, run by an emulated block of threads: ``tests.gpu.emulator``.

What the host's loops cannot show: barriers, lanes and registers of tensor cores, copies that are on
their way, addresses in shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from tests.gpu.emulator import machine
from tests.gpu.emulator.machine import ORDERS, Fault, Kernels, Order
from tests.gpu.test_gpu_kernels import CASES, _newer, tolerance
from torch_pruner.codegen.build.gpu.image import launches_of
from torch_pruner.codegen.build.gpu.source import cuda_source
from torch_pruner.graph.reference import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = [
    pytest.mark.tvm,
    pytest.mark.skipif(bool(machine.problem()), reason=machine.problem()),
]
PARTS = 6  # of all kernels, each a source, as a network's kernels are


def faults(names: Sequence[str], arch: str, orders: Callable[[int], Sequence[Order]]) -> list[str]:
    """What goes wrong in kernels of ``CASES``; ``orders`` in which the n-th of them is run."""
    scheduled = {f"k{n}": schedule(*CASES[name]) for n, name in enumerate(names)}
    source, launches = cuda_source(scheduled, arch)
    kernels = Kernels(source, launches, arch)
    found = []
    for n, (name, (key, kernel)) in enumerate(zip(names, scheduled.items(), strict=True)):
        spec = CASES[name][0]
        arrays = K.inputs_for(spec)
        expected = evaluate(spec, arrays)
        own = [launches[k] for k in launches_of(key, launches)]
        for order in orders(n):
            try:
                outputs = machine.ran(kernels, own, kernel, arrays, order)
                if (error := K.error(outputs, expected)) >= tolerance(spec):
                    found.append(f"{name}, {order}: off by {error}")
            except (Fault, AssertionError) as err:  # NaN where there should be none
                found.append(f"{name}, {order}: {err}")
    return found


def cases(arch: str) -> list[str]:
    return [name for name in CASES if arch != "sm_75" or not _newer(CASES[name])]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", range(PARTS))
def test_numbers_of_an_emulated_block(part: int) -> None:
    names = cases("sm_90a")[part::PARTS]
    assert faults(names, "sm_90a", lambda n: [ORDERS[n % len(ORDERS)]]) == []


def test_numbers_of_a_block_of_older_tensor_cores() -> None:
    names = [n for n in cases("sm_75") if CASES[n][2].get("tensor") or "attention" in n]
    assert len(names) >= 8
    assert faults(names[::3], "sm_75", lambda n: [ORDERS[n % len(ORDERS)]]) == []


@pytest.mark.rotated(12)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_numbers_in_every_order(arch: str) -> None:
    assert faults(cases(arch), arch, lambda n: ORDERS) == []
