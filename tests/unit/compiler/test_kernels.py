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
