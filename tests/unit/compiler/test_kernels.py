"""Which cached kernels a process may run."""

from __future__ import annotations

import pytest

from torch_pruner.compiler import kernels
from torch_pruner.config import Config
from torch_pruner.task import Candidate


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
        (1e-3, 3e-3, 2, True),
        (1e-3, 1.09e-3, 1, False),
    ],
)
def test_a_vendor_kernel_pays_for_its_thread_pool(
    vendor_s: float, ours_s: float, threads: int, wins: bool
) -> None:
    assert kernels._wins(vendor_s, ours_s, threads) is wins
