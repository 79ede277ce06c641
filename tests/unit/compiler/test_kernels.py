"""Which cached kernels a process may run."""

from __future__ import annotations

import pytest

from torch_pruner.compiler import kernels
from torch_pruner.config import Config
from torch_pruner.graph.ir import Builder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureResult, MeasureStatus, Task
from torch_pruner.tuner.session import TaskOutcome


@pytest.mark.parametrize(
    ("sketch", "library", "allowed", "usable"),
    [
        ("contraction", False, False, True),
        ("library", True, False, True),
        ("library", False, True, False),
        ("tiles", True, True, True),
        ("tiles", True, False, False),
    ],
)
def test_what_the_process_may_not_run_is_a_miss(
    monkeypatch, sketch: str, library: bool, allowed: bool, usable: bool
) -> None:
    """Tile registers are refused by a system that the process that tuned did not run on."""
    monkeypatch.setattr(kernels, "tiles_allowed", lambda: allowed)
    config = Config.from_options(options={"library": library})
    assert kernels._usable(Candidate(sketch), config) is usable


@pytest.mark.parametrize(
    ("vendor_s", "ours_s", "threads", "wins"),
    [
        (1e-4, 2e-4, 1, True),
        (1e-4, 2e-4, 2, False),  # its idle workers would cost more than it saves
        (1e-3, 9e-3, 2, False),
        (1e-3, 20e-3, 2, True),
        (1e-3, 1.09e-3, 1, False),
    ],
)
def test_a_vendor_kernel_pays_for_its_thread_pool(
    vendor_s: float, ours_s: float, threads: int, wins: bool
) -> None:
    assert kernels._wins(vendor_s, ours_s, threads) is wins


@pytest.mark.parametrize(("ours_s", "asked"), [(9e-3, False), (20e-3, True)])
def test_the_vendor_is_timed_only_where_it_can_win(ours_s: float, asked: bool) -> None:
    class Vendor:
        calls = 0

        def latency_s(self, spec: object) -> float:
            self.calls += 1
            return 1.0

    b = Builder()
    x, w = b.input(0, (128, 512), "float32"), b.input(1, (512, 512), "float32", static=True)
    task = Task("matmul", b.finish([b.matmul(x, w)]), TargetSpec.detect(2), 2, 1)
    best = MeasureResult(Candidate("contraction"), MeasureStatus.OK, (ours_s,), "")
    found = TaskOutcome(task, best, None, ours_s, 1, 0, "")
    vendor = Vendor()
    choice = kernels._settle(task, found, Config(), None, vendor)
    assert (choice.source, vendor.calls) == ("tuned", int(asked))
