"""The loops that measure the machine compile and run; how fast they are is not tested."""

from __future__ import annotations

import pytest

from benchmarks import machine_peak

pytestmark = pytest.mark.tvm


@pytest.mark.parametrize("threads", [1, 2])
def test_loops_run_and_count_their_work(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_peak, "FMA_STEPS", 3)
    multiply_add, flops = machine_peak.fma_loop(threads)
    multiply_add()
    assert flops % (2 * 3 * threads * machine_peak.ACCUMULATORS) == 0
    read, nbytes = machine_peak.read_loop(threads, 1 << 20)
    read()
    assert 0 < nbytes <= 1 << 20
