"""Tests that are slow take turns; each has one, and turns are about equally long."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests import slow

if TYPE_CHECKING:
    from pathlib import Path


def test_each_slow_test_has_its_turn(tmp_path: Path) -> None:
    seconds = {f"test_{i}": i % 7 + 3 for i in range(60)}
    (file := tmp_path / "slow.json").write_text(json.dumps(seconds))
    turn_of = slow.turns(file)
    lengths = [sum(s for t, s in seconds.items() if turn_of[t] == i) for i in range(slow.TURNS)]
    assert sum(lengths) == sum(seconds.values())
    assert max(lengths) - min(lengths) <= max(seconds.values())


def test_a_commit_runs_one_turn_and_what_is_fast() -> None:
    turn_of = {f"test_{i}": i for i in range(slow.TURNS)}
    seen = set()
    for commit in (b"%d" % i for i in range(50)):
        assert slow.runs(turn_of, "test_fast", commit)
        ran = [t for t in turn_of if slow.runs(turn_of, t, commit)]
        assert len(ran) == 1
        seen.update(ran)
    assert seen == set(turn_of)
