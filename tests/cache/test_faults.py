"""A sample of the storm: ``python -m tests.suites.faults`` has 300 kills and 500 flipped bits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.suites import faults

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_kills_after_a_commit_lose_nothing(tmp_path: Path) -> None:
    found = faults.kill_many(tmp_path / "cache", 6, seed=1)
    assert (found.kills, found.lost, found.problems) == (6, [], [])
    assert found.committed >= 6


def test_flipped_bits_are_survived_in_every_kind_of_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", os.environ["XDG_DATA_HOME"])  # restored afterwards
    found = faults.flip_many(tmp_path, 3 * len(faults.KINDS), seed=1)
    assert [f.flips for f in found.values()] == [3] * len(faults.KINDS)
    assert not [text for f in found.values() for text in f.wrong + f.crashes]
